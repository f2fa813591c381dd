"""Chooses the training loader that an execution names. The choice of `auto` is made elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from paceline.conf.augmentation import Vary
from paceline.conf.execution import Loading
from paceline.conf.recipe import Augment
from paceline.tasks.data.loading.foreground import ForegroundLoader
from paceline.tasks.data.loading.resident import ResidentLoader
from paceline.tasks.data.loading.sampling import BatchPlan, Shuffle
from paceline.tasks.data.loading.streaming import StreamingLoader
from paceline.tasks.data.loading.train_loader import LoaderConfig, TrainLoader
from paceline.tasks.data.split import Split

__all__ = ["TrainLoader", "make_loader"]

_LOADERS: dict[Loading, type[TrainLoader]] = {
    "resident": ResidentLoader,
    "streaming": StreamingLoader,
    "foreground": ForegroundLoader,
}

_AS_THEY_ARE = Vary()


def make_loader(  # noqa: PLR0913 - keywords; it is the stage's public name for a Feed
    split: Split,
    mean: Sequence[float],
    std: Sequence[float],
    *,
    loading: Loading,
    plan: BatchPlan,
    rank: int,
    seed: int,
    augment: Augment,
    shift_pixels: int,
    shuffle_mib: int,
    device: torch.device,
    channels_last: bool,
    draws: bool = False,
    vary: Vary = _AS_THEY_ARE,
    first_step: int = 0,
) -> TrainLoader:
    """Make a training loader; all kinds deliver the same batches in the same order, bit for bit on one device.

    Args:
        split: The training split.
        mean: Per channel, in units of full scale.
        std: Per channel, in units of full scale.
        loading: Kind of loader.
        plan: How epochs are cut into batches.
        rank: Whose part of each batch is delivered.
        seed: Of order and augmentation.
        augment: Kind of augmentation.
        shift_pixels: Largest shift in each direction, pixels.
        shuffle_mib: Size of the windows that are shuffled as one, MiB.
        device: Where batches are delivered.
        channels_last: Memory format of the images.
        draws: Whether something is added to the images at random.
        vary: Further augmentation.
        first_step: Step, counted over all epochs, to begin with.

    Raises:
        ValueError: The plan is of another number of samples than the split.
    """
    if plan.num_samples != split.num_samples:
        raise ValueError(f"plan of {plan.num_samples} samples for a split of {split.num_samples}")
    feed = LoaderConfig(
        split=split,
        mean=tuple(mean),
        std=tuple(std),
        plan=plan,
        rank=rank,
        seed=seed,
        augment=augment,
        shift_pixels=shift_pixels,
        shuffle=Shuffle.of(math.prod(split.image_shape), shuffle_mib),
        device=device,
        channels_last=channels_last,
        draws=draws,
        vary=vary,
    )
    return _LOADERS[loading](feed, first_step)
