"""A rank's share of a batch in several passes, whose gradients add up to those of the whole share.

The loss of a batch is a mean over its samples. Of a pass it is weighted by the pass's part of them, so the sum over the
passes is the loss of the whole, also where they differ in size. Knows nothing of networks or devices.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from paceline.tasks.errors import MeasureMemoryError, MemoryLimitError
from paceline.tasks.model.batch import LabelledBatch


def split_into_micro_batches(batch: LabelledBatch, largest: int | None) -> list[LabelledBatch]:
    """A batch in as few parts as may be, none larger than `largest`; sizes differ by one at most.

    Even parts, because batch norms take their statistics over each: a last one of few samples would have poor ones.
    """
    num = len(batch.labels_N)
    number = 1 if largest is None else max(1, -(-num // largest))
    if number == 1:
        return [batch]
    bounds = [num * part // number for part in range(number + 1)]
    return [take_samples(batch, start, stop) for start, stop in pairwise(bounds)]


def take_samples(batch: LabelledBatch, start: int, stop: int) -> LabelledBatch:
    """Some of a batch's samples, weighted by how many of it they are."""
    fields = batch._asdict()  # type: ignore[attr-defined]
    parts = {name: value[start:stop] for name, value in fields.items() if isinstance(value, torch.Tensor)}
    weight = batch.weight * (stop - start) / max(1, len(batch.labels_N))
    return batch._replace(**parts, weight=weight)  # type: ignore[attr-defined, no-any-return]


def out_of_memory(batch: LabelledBatch, error: torch.OutOfMemoryError) -> MemoryLimitError:
    """What to raise for a pass that did not fit."""
    num = len(batch.labels_N)
    return MemoryLimitError(
        f"a pass over {num} samples needs more memory than {batch.images_NCHW.device} has: {error}", num
    )


def oom_sample_count(error: BaseException | None) -> int | None:
    """The samples of the training's pass that did not fit, where that has led to an error; None where it has not.

    It may lie behind others: the end of a recording that it broke off fails as well.
    """
    while error is not None and not isinstance(error, (MemoryLimitError, MeasureMemoryError)):
        error = error.__cause__ or error.__context__
    return error.num_samples if isinstance(error, MemoryLimitError) else None
