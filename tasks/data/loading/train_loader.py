"""Base class of the training loaders: the cursor, the order of samples, the plan of batches, the augmentation."""

import math
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.conf.recipe import Augment, Vary
from paceline.tasks.data.loading import sampling
from paceline.tasks.data.loading.augmentation import Variation, crops
from paceline.tasks.data.loading.batch import Array, Normalise, PinnedRing, UInt8s
from paceline.tasks.data.loading.sampling import BatchPlan, Int64s, StepSchedule, epoch_augmentation, epoch_order
from paceline.tasks.data.loading.split_reader import PhotoSplit
from paceline.tasks.data.split import Split
from paceline.tasks.model.batch import Batch

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class LoaderConfig:
    """Settings of a loader."""

    split: Split
    mean: Sequence[float]  # of each channel, in units of full scale, as is `std`
    std: Sequence[float]
    plan: BatchPlan
    rank: int
    seed: int  # seed of order and augmentation
    augment: Augment
    shift_pixels: int  # largest shift in each direction
    shuffle_mib: int  # size of the windows that are shuffled as one
    device: torch.device
    channels_last: bool
    draws: bool = False  # whether batches have `noise_seeds_N`
    vary: Vary = field(default_factory=Vary)

    def __post_init__(self) -> None:
        if self.plan.num_samples != self.split.num_samples:
            raise ValueError(f"plan of {self.plan.num_samples} samples for a split of {self.split.num_samples}")

    @property
    def padding(self) -> int:
        """Pixels of padding on each side."""
        return sampling.padding(self.augment, self.shift_pixels)

    @property
    def fill_C(self) -> UInt8s:
        """The colour of the padding: the rounded mean, which normalises to about 0."""
        return np.round(np.asarray(self.mean) * 255.0).clip(0, 255).astype(np.uint8)

    @property
    def photographs(self) -> PhotoSplit | None:
        """The split, where random crops are cut out of stored images that are larger."""
        if self.vary.crop_scale is not None and isinstance(self.split, PhotoSplit) and self.split.keeps_aspect:
            return self.split
        return None

    @property
    def shuffle(self) -> sampling.Shuffle:
        """Sizes of the shuffle."""
        return sampling.Shuffle.of(math.prod(self.split.image_shape), self.shuffle_mib)


@dataclass(frozen=True)
class BatchRequest:
    """The samples of one rank's batch and how each is augmented; all arrays are as long as the batch."""

    index_N: Int64s
    flip_N: npt.NDArray[np.bool_]
    dy_N: Int64s
    dx_N: Int64s
    draw_N: Int64s
    weight: float
    boxes_N4: Int64s | None
    """Random crops of stored images: top, left, height and width. None where the loader crops nothing."""


class TrainLoader(ABC):
    """Sized and iterable; each iteration ends with its epoch, and the next one starts there.

    `next_step` counts steps over all epochs. Iterating is lazy: the cursor is read, and threads start, with the first
    batch, so that iterators which are never used cost and change nothing.
    """

    def __init__(self, feed: LoaderConfig) -> None:
        self.feed = feed
        self._course = StepSchedule(feed.plan)
        self.next_step = 0
        self.normalise = Normalise(feed.mean, feed.std, feed.split.image_shape).to(feed.device)
        vary = feed.vary if feed.photographs is None else feed.vary.model_copy(update={"crop_scale": None})
        self._variation = Variation(vary, feed.mean, feed.std, feed.seed, feed.device)
        self.ring = PinnedRing(feed.device)

    def __len__(self) -> int:
        return self.feed.plan.steps_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        with closing(self._batches(self.requests(*self._course.locate(self.next_step)))) as batches:
            for batch in batches:
                self.next_step += 1
                yield batch

    def seek(self, step: int) -> None:
        """Set the cursor; the next iteration starts there."""
        if step < 0:
            raise ValueError(f"step {step} is below 0")
        self.next_step = step

    def follow(self, course: StepSchedule) -> None:
        """Resume a training at the first step of a schedule; another group may have done the steps before."""
        if course.plan != self.feed.plan:
            raise ValueError(f"a schedule of {course.plan} for a loader of {self.feed.plan}")
        self._course = course
        self.next_step = course.first_step

    def pause(self) -> None:
        """Read nothing ahead until the next batch is asked for."""
        return

    def close(self) -> None:
        """End background work, for loaders that have any; iterating again restarts it."""
        return

    def requests(self, epoch: int, plan: BatchPlan, first_local_step: int) -> Iterator[BatchRequest]:
        """This rank's requests from a step of an epoch to the epoch's end."""
        feed, photographs = self.feed, self.feed.photographs
        order = epoch_order(plan.num_samples, feed.seed, epoch, feed.shuffle)
        flip, dy, dx = epoch_augmentation(order, feed.seed, epoch, feed.augment, feed.shift_pixels)
        for step in range(first_local_step, plan.steps_per_epoch):
            positions = plan.local(step, feed.rank, order, feed.split.shards_of)
            draw_N = epoch * plan.num_samples + positions
            index_N, weight = order[positions], plan.weight(step, feed.rank)
            sizes_N2 = None if photographs is None else photographs.sizes_N2[index_N]
            boxes_N4 = None if sizes_N2 is None else crops(feed.vary, draw_N, feed.seed, sizes_N2)
            yield BatchRequest(index_N, flip[positions], dy[positions], dx[positions], draw_N, weight, boxes_N4)

    def draw(self, request: BatchRequest) -> dict[str, Array]:
        """What `answer` needs on the device: random numbers of the samples."""
        height, width, _ = self.feed.split.image_shape
        seeds = {"noise_seeds_N": request.draw_N} if self.feed.draws else {}
        return seeds | self._variation.draw(request.draw_N, (height, width))

    def answer(
        self, request: BatchRequest, images_NCHW: Tensor, labels_N: Tensor, targets_NT: Tensor | None, drawn: Tensors
    ) -> Batch:
        """Make a batch of tensors on the device: normalised images in their memory format, labels, targets, draws."""
        batch = Batch(images_NCHW, labels_N, targets_NT, drawn.get("noise_seeds_N"), request.weight)
        return self._variation(batch, drawn, channels_last=self.feed.channels_last)

    @abstractmethod
    def _batches(self, requests: Iterator[BatchRequest]) -> Generator[Batch]:
        """Answer requests in order; closed when the consumer goes away."""
