"""Forward passes over a split without gradients: validation and prediction are the same loop.

Shapes: N samples, T regression targets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import nn

from tasks.model.objective import LabelledBatch
from tasks.model.task import Outputs, Task

Int64s = np.ndarray[tuple[int], np.dtype[np.int64]]


@torch.no_grad()
def predictions(
    network: nn.Module,
    batches: Iterable[tuple[Int64s, LabelledBatch]],
    context: AbstractContextManager[object],
    task: Task,
) -> Iterator[tuple[Int64s, LabelledBatch, Outputs]]:
    """Yield `(indices_N, batch, outputs)`, these in float32, for each batch.

    Args:
        network: is put into evaluation mode, and back as it was when the iteration ends.
        batches: of a split, with the indices of their samples.
        context: autocast region; must be re-enterable.
        task: says what of a batch the network sees.
    """
    was_training = network.training
    network.eval()
    dtype = next(network.parameters()).dtype
    try:
        for indices_N, batch in batches:
            with context:
                found, targets_NT = network(task.inputs(batch).to(dtype))
            yield indices_N, batch, (found.float(), None if targets_NT is None else targets_NT.float())
    finally:
        network.train(was_training)
