"""A batch, and the interfaces of its sources, as training steps use them."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch

# Shape suffixes: N samples, C channels, H height, W width, T targets.


class Batch(NamedTuple):
    """The input of a training step, on the device of a rank."""

    images_NCHW: torch.Tensor  # float32, normalised, in the requested memory format
    labels_N: torch.Tensor  # int64
    targets_NT: torch.Tensor | None  # float32 regression targets, where the data has them
    noise_seeds_N: torch.Tensor | None
    """int64, another for each sample and epoch: what is added at random follows from them. None where nothing is."""
    weight: float
    """local samples x ranks / global samples: a rank's mean loss times this, averaged over the ranks as DDP does with
    gradients, is the exact mean over the global batch even when the ranks' parts differ in size."""
    mixed_labels_N: torch.Tensor | None = None  # int64 classes of the images that are mixed in; None where none are
    mix_weights_N: torch.Tensor | None = None
    """float32: how much of each image is of its own class; the rest is of the other."""


def take_samples(batch: Batch, start: int, stop: int) -> Batch:
    """A slice of a batch, weighted by its part of the samples."""
    fields = batch._asdict()
    parts = {name: value[start:stop] for name, value in fields.items() if isinstance(value, torch.Tensor)}
    weight = batch.weight * (stop - start) / max(1, len(batch.labels_N))
    return batch._replace(**parts, weight=weight)


class BatchSource(Protocol):
    """Source of batches: sized in steps per epoch, positioned by global step."""

    def __len__(self) -> int:
        """Steps per epoch."""

    def __iter__(self) -> Iterator[Batch]:
        """Batches from the position to the end of its epoch."""

    def seek(self, step: int) -> None:
        """Go to a global step."""

    def pause(self) -> None:
        """Read nothing ahead until the next batch is asked for."""
