"""The interfaces of batches and their sources, as training steps use them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    pass


class LabelledBatch(Protocol):
    """A batch of a loader."""

    @property
    def images_NCHW(self) -> torch.Tensor:
        """Normalised float32 images on the device."""

    @property
    def labels_N(self) -> torch.Tensor:
        """Class indices, int64."""

    @property
    def targets_NT(self) -> torch.Tensor | None:
        """Regression targets, float32, or None."""

    @property
    def noise_seeds_N(self) -> torch.Tensor | None:
        """int64: what is added at random follows from them; None where nothing is."""

    @property
    def weight(self) -> float:
        """n_local * world_size / n_global."""

    @property
    def mixed_labels_N(self) -> torch.Tensor | None:
        """Classes of images that are mixed in, int64, or None."""

    @property
    def mix_weights_N(self) -> torch.Tensor | None:
        """Share of each image's own class, float32, or None for all."""


class StepScheduleLike(Protocol):
    """The steps of a training laid over its epochs; steps are counted over all of them."""

    @property
    def steps_per_epoch(self) -> int:
        """Steps of a complete epoch."""

    @property
    def num_passed(self) -> int:
        """Of `steps_per_epoch`, those that are behind this group where it takes up; all of them at an epoch's end."""

    def position(self, step: int) -> tuple[int, int]:
        """What has been seen when so many steps are done: whole epochs, and samples of the next one."""

    def samples(self, step: int) -> int:
        """Number of samples after a number of steps, over all epochs."""

    def ends_epoch(self, step: int) -> bool:
        """Whether an epoch ends after a number of steps."""

    def epoch_end(self, step: int) -> int:
        """The first step from this one on after which an epoch is over."""

    def num_steps(self, num_epochs: int) -> int:
        """Steps of a training of a number of epochs."""

    def even_step(self, step: int) -> float:
        """Which step this would be if all before it had been of this group's batch size; what schedules go by."""


class BatchSource(Protocol):
    """Source of batches: sized in steps per epoch, positioned by global step."""

    def __len__(self) -> int:
        """Steps per epoch."""

    def __iter__(self) -> Iterator[LabelledBatch]:
        """Batches from the position to the end of its epoch."""

    def seek(self, step: int) -> None:
        """Go to a global step."""
