"""Micro-batches: a rank's share of a batch in several passes, whose gradients add up to those of one pass.

The loss of a batch is a mean over its samples. The loss of a pass is weighted by its part of them, so that the sum over
the passes is the loss of the batch, also where they differ in size.
"""

from itertools import pairwise

import torch

from paceline.tasks.errors import MeasureMemoryError, MemoryLimitError, causes_of
from paceline.tasks.model.batch import Batch, take_samples
from paceline.tasks.model.out_of_memory import is_out_of_memory


def split_into_micro_batches(batch: Batch, largest: int | None) -> list[Batch]:
    """Split a batch into the fewest parts of at most `largest` samples; sizes differ by one at most.

    Even parts, because batch norms take their statistics over each: those of a small last part would be poor.
    """
    num = len(batch.labels_N)
    number = 1 if largest is None else max(1, -(-num // largest))
    if number == 1:
        return [batch]
    bounds = [num * part // number for part in range(number + 1)]
    return [take_samples(batch, start, stop) for start, stop in pairwise(bounds)]


def raise_if_out_of_memory(error: Exception, what: str, num_samples: int, device: torch.device) -> None:
    """Raise MemoryLimitError for an error of `what`, a part of a step over so many samples, that is want of memory."""
    if is_out_of_memory(error):
        raise MemoryLimitError(
            f"{what} over {num_samples} samples needs more memory than {device} has: {error}", num_samples
        ) from error


def oom_sample_count(error: BaseException | None) -> int | None:
    """The number of samples of the training's pass that ran out of memory and caused `error`; None for other errors."""
    limits = (cause for cause in causes_of(error) if isinstance(cause, (MemoryLimitError, MeasureMemoryError)))
    first = next(limits, None)
    return first.num_samples if isinstance(first, MemoryLimitError) else None
