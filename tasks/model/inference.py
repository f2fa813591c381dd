"""Forward passes over a split without gradients: validation and prediction are the same loop.

Shapes: N samples, C channels, H height, W width, T regression targets.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from paceline.tasks.model.batch import Batch, take_samples
from paceline.tasks.model.objectives import Outputs, Task
from paceline.tasks.model.out_of_memory import is_out_of_memory

Int64s = np.ndarray[tuple[int], np.dtype[np.int64]]


class Prediction(NamedTuple):
    """Outputs of one batch."""

    indices_N: Int64s  # of its samples in the split
    batch: Batch
    inputs_NCHW: torch.Tensor  # what the network saw
    outputs: Outputs


@torch.no_grad()
def predictions(
    network: nn.Module, batches: Iterable[tuple[Int64s, Batch]], context: AbstractContextManager[object], task: Task
) -> Iterator[Prediction]:
    """Predict each batch, in float32, in evaluation mode, within `context` (autocast), which must be re-enterable.

    The network's mode is restored when the iteration ends. Batches come with the indices of their samples. One that
    the memory of the device does not suffice for becomes two.
    """
    was_training = network.training
    network.eval()
    dtype = next(network.parameters()).dtype
    try:
        for indices_N, batch in batches:
            waiting = [(indices_N, batch)]
            while waiting:
                part_N, part = waiting.pop()
                try:
                    with context:
                        inputs_NCHW = task.inputs(part)
                        outputs_NK, targets_NT = network(inputs_NCHW.to(dtype))
                    outputs = outputs_NK.float(), None if targets_NT is None else targets_NT.float()
                except RuntimeError as error:
                    if len(part_N) == 1 or not is_out_of_memory(error):
                        raise
                    half = len(part_N) // 2
                    waiting.append((part_N[half:], take_samples(part, half, len(part_N))))
                    waiting.append((part_N[:half], take_samples(part, 0, half)))
                    continue
                yield Prediction(part_N, part, inputs_NCHW, outputs)
    finally:
        network.train(was_training)
