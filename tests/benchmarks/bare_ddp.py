"""Two ranks of one thread against one in a loop by hand, for `torchrun`: what this machine gives without paceline.

Prints the rounds as JSON, the first one left out. Arguments: samples of one device's step, seconds.
"""

import json
import statistics
import sys
import time

import torch
from torch import distributed
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from paceline.tasks.model.networks.registry import ConvBlocks

STEPS = 4


class Arm:
    def __init__(self, spread, batch_size):
        torch.manual_seed(0)
        network = ConvBlocks(3, 10, width=32, depth=4)
        if spread:
            network = DistributedDataParallel(network, gradient_as_bucket_view=True, broadcast_buffers=False)
        self.num_samples = 2 * batch_size if spread else batch_size
        self._network = network
        self._optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
        self._images_NCHW = torch.randn(batch_size, 3, 32, 32)
        self._labels_N = torch.randint(0, 10, (batch_size,))

    def step(self):
        started = time.perf_counter()
        self._optimizer.zero_grad()
        cross_entropy(self._network(self._images_NCHW)[0], self._labels_N).backward()
        self._optimizer.step()
        return time.perf_counter() - started


def main(batch_size, seconds):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    is_first = distributed.get_rank() == 0
    arms = {"baseline": Arm(False, batch_size), "candidate": Arm(True, batch_size)}
    rounds, ends = [], time.monotonic() + seconds
    while going_on(ends):
        order = list(arms) if len(rounds) % 2 == 0 else list(arms)[::-1]
        blocks = []
        for role in order:
            distributed.barrier()
            times = [arms[role].step() for _ in range(STEPS)] if is_first or role == "candidate" else []
            if is_first:
                seconds_per_sample = statistics.fmean(times) / arms[role].num_samples
                blocks.append({"arm": role, "seconds_per_sample": seconds_per_sample, "num_steps": len(times)})
        rounds.append(blocks)
    if is_first:
        print(json.dumps(rounds[1:]))
    distributed.destroy_process_group()


def going_on(ends):
    """Rank 0's clock counts."""
    late = torch.tensor(float(time.monotonic() > ends))
    distributed.broadcast(late, 0)
    return not late


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
