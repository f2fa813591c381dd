"""What `torch.set_num_threads` costs on CPUs: a step with the settings of MKL that this call makes, over one without.

python -m tests.benchmarks.threads_of_mkl         about two minutes; OMP_NUM_THREADS sets the number of threads

In one process, for each of four kinds of model: 30 pairs of timings, A B B A, each timing a third of a second long.
"""

import ctypes
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from paceline.tasks.measure.paired_ratio import FIXED_CONFIDENCE, estimate_ratio

NUM_PAIRS = 30
SECONDS = 0.3


class Attention(nn.Module):
    """Causal attention with four heads, (batch, time, channels) to the same."""

    def __init__(self, width):
        super().__init__()
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x_BTC):
        batch, time_, width = x_BTC.shape
        heads = [part.view(batch, time_, 4, -1).transpose(1, 2) for part in self.inputs(x_BTC).split(width, 2)]
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return x_BTC + self.output(mixed.transpose(1, 2).reshape(batch, time_, width))


def models():
    """Name, model and input."""
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    convolutions = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3, 2), nn.ReLU())
    linear = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10))
    yield "causal attention", nn.Sequential(Attention(64), Attention(64)), torch.randn(32, 128, 64)
    yield "encoder layer with dropout", layer, torch.randn(32, 128, 64)
    yield "convolutions", convolutions, torch.randn(64, 3, 32, 32)
    yield "linear layers", linear, torch.randn(256, 784)


def main():
    mkl = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    num_threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    for name, model, inputs in models():
        optimizer = torch.optim.AdamW(model.parameters())

        def seconds(number, model=model, inputs=inputs, optimizer=optimizer):
            began = time.perf_counter()
            for _ in range(number):
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
            return (time.perf_counter() - began) / number

        seconds(10)
        number = max(1, int(SECONDS / seconds(5)))
        logs = []
        for pair in range(NUM_PAIRS):
            found = {}
            for called in (True, False)[:: 1 if pair % 2 else -1]:
                mkl.MKL_Set_Dynamic(int(not called))
                mkl.MKL_Set_Num_Threads_Local(num_threads if called else 0)
                found[called] = seconds(number)
            logs.append(np.log(found[True] / found[False]))
        ratio = estimate_ratio(np.array(logs), FIXED_CONFIDENCE)
        print(f"{name}: {ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]")


if __name__ == "__main__":
    main()
