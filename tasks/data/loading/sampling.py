"""The samples of each step: their order, their augmentation (functions of seed, epoch, position), and the batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from paceline.conf.recipe import FLIPPING, Augment
from paceline.tasks.data.split import owner

BLOCK_BYTES = 4 * 2**20
MAX_BLOCK = 1_024  # samples of a block, however small they are
_ORDER, _AUGMENTATION, _PARITY = 0, 1, 2

Int64s = npt.NDArray[np.int64]
Shards = Callable[[Int64s], Int64s]  # sample numbers (N,) to the numbers of the shards that hold them (N,)


def _generator(seed: int, epoch: int, stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, epoch, stream))))


@dataclass(frozen=True)
class Shuffle:
    """Sizes of the two-level shuffle, in samples."""

    window: int  # largest number of samples that are permuted as one; a multiple of the block's
    block: int  # contiguous samples that move together when there are more

    @classmethod
    def of(cls, sample_bytes: int, window_mib: int) -> Shuffle:
        """Blocks of `BLOCK_BYTES`, which disks read at full speed, and windows of so many MiB."""
        block = min(MAX_BLOCK, max(1, BLOCK_BYTES // sample_bytes))
        return cls(window=max(1, window_mib * 2**20 // sample_bytes // block) * block, block=block)


def epoch_order(num_samples: int, seed: int, epoch: int, shuffle: Shuffle) -> Int64s:
    """The order of an epoch: a permutation of the samples.

    Up to a window of samples it is uniform over all permutations. Above, blocks of contiguous samples are permuted,
    then every window of them is permuted within, so that at most one window is read from disk at a time. Two samples of
    one block meet in a batch more often than two of different blocks; shards are made so that a block is a
    cross-section of the classes (`paceline.tasks.data.prepare.chunks`).
    """
    rng = _generator(seed, epoch, _ORDER)
    if num_samples <= shuffle.window:
        return rng.permutation(num_samples).astype(np.int64)
    starts = rng.permutation(np.arange(0, num_samples, shuffle.block, dtype=np.int64))
    order = (starts[:, np.newaxis] + np.arange(shuffle.block, dtype=np.int64)).ravel()
    order = order[order < num_samples]
    for start in range(0, num_samples, shuffle.window):
        rng.shuffle(order[start : start + shuffle.window])
    return order


def epoch_augmentation(
    order_N: Int64s, seed: int, epoch: int, augment: Augment, shift_pixels: int
) -> tuple[npt.NDArray[np.bool_], Int64s, Int64s]:
    """The augmentation of every position of an epoch: first the flip, then a window of the padded image.

    These are whether to flip left-right (N,), and the top row and left column (N,) of the window in the image padded by
    `padding(augment, shift_pixels)` on all sides; the padding itself is the unshifted window.
    """
    num_samples, rng = len(order_N), _generator(seed, epoch, _AUGMENTATION)
    dy_N, dx_N = rng.integers(0, 2 * padding(augment, shift_pixels) + 1, size=(2, num_samples), dtype=np.int64)
    if augment not in FLIPPING:
        return np.zeros(num_samples, dtype=np.bool_), dy_N, dx_N
    if augment == "flip_shift":
        return rng.integers(0, 2, size=num_samples).astype(np.bool_), dy_N, dx_N
    return alternating_flips(num_samples, seed, epoch)[order_N], dy_N, dx_N


def alternating_flips(num_samples: int, seed: int, epoch: int) -> npt.NDArray[np.bool_]:
    """Whether each sample (num_samples,) is flipped: in every second epoch, in odd or in even ones as its coin fell.

    Two epochs on end show each sample both ways, where flips by chance show half of the samples one way twice.

    Source: Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU" (2024), "alternating flip".
    """
    parity_N = _generator(seed, 0, _PARITY).integers(0, 2, size=num_samples)
    return np.asarray((parity_N + epoch) % 2 == 1)


def padding(augment: Augment, shift_pixels: int) -> int:
    """Pixels of padding on each side that the shifts need."""
    return 0 if augment == "none" else shift_pixels


def share(start: int, stop: int, rank: int, world_size: int) -> tuple[int, int]:
    """A rank's contiguous part of a range, as even as possible (the rule of `numpy.array_split`)."""
    each, more = divmod(stop - start, world_size)
    begin = start + rank * each + min(rank, more)
    return begin, begin + each + (rank < more)


def deal(owner_N: Int64s, sizes: Sequence[int]) -> Int64s:
    """The rank (N,) of each position of a batch: its owner as far as its part of `sizes` reaches, then by turns."""
    ranks_N, missing = np.full(len(owner_N), -1, dtype=np.int64), list(sizes)
    for rank, size in enumerate(sizes):
        positions = np.flatnonzero(owner_N == rank)[:size]
        ranks_N[positions] = rank
        missing[rank] -= len(positions)
    ranks_N[ranks_N < 0] = np.repeat(np.arange(len(sizes)), missing)
    return ranks_N


def apportion(num_samples: int, loads: Sequence[float]) -> tuple[int, ...]:
    """Cut a number of samples into shares proportional to loads, by largest remainder; the first of equal ones wins.

    No share is empty while there are as many samples as shares. In exact arithmetic: all ranks cut alike.
    """
    total = sum(Fraction(load) for load in loads)
    exact = [num_samples * Fraction(load) / total for load in loads]
    parts = [int(part) for part in exact]
    by_remainder = sorted(range(len(parts)), key=lambda rank: parts[rank] - exact[rank])
    for rank in by_remainder[: num_samples - sum(parts)]:
        parts[rank] += 1
    while min(parts) == 0 and num_samples >= len(parts):
        parts[parts.index(max(parts))] -= 1
        parts[parts.index(0)] += 1
    return tuple(parts)


@lru_cache
def _sizes(num_samples: int, world_size: int, loads: tuple[float, ...] | None) -> tuple[int, ...]:
    """Cached: every step needs it, for two sizes of batches, the full one and the last one."""
    if loads is not None:
        return apportion(num_samples, loads)
    each, more = divmod(num_samples, world_size)
    return tuple(each + (rank < more) for rank in range(world_size))


@dataclass(frozen=True)
class BatchPlan:
    """The division of an epoch into global batches, and of these into the ranks' parts.

    Ranks of unequal speed take parts in proportion to `loads`, one number per rank; None for even parts. Loads move the
    cuts between the ranks and never those between the batches: whatever they are, and if they change at a resume, a
    step sees the same samples.

    A last batch smaller than `max(world_size, global_batch_size // 8)` is folded into the one before: a handful of
    samples makes a noisy step and may leave ranks without any. Where fewer samples than ranks remain all the same,
    because a smaller group has taken an epoch so far, every rank takes all of them.
    """

    num_samples: int
    global_batch_size: int
    world_size: int = 1
    loads: tuple[float, ...] | None = None
    planned_world_size: int | None = None
    """World size of the complete group, where fewer ranks resume its work with the same batches."""
    first_sample: int = 0  # first position of the epoch's order that is still to be seen, after a resume

    def __post_init__(self) -> None:
        if min(self.num_samples, self.global_batch_size, self.world_size) < 1:
            raise ValueError(f"{self}: every size must be at least 1")
        if not 0 <= self.first_sample < self.num_samples:
            raise ValueError(f"{self}: first_sample must be one of the samples")
        loads = self.loads
        if loads is not None and not (len(loads) == self.world_size and all(0 < load < math.inf for load in loads)):
            raise ValueError(f"{self}: loads must be one positive number for each rank")

    @property
    def steps_per_epoch(self) -> int:
        """Global batches in an epoch, or in what is left of it."""
        full, last = divmod(self.num_samples - self.first_sample, self.global_batch_size)
        ranks = max(self.world_size, self.planned_world_size or 1)
        stands_alone = last >= max(ranks, self.global_batch_size // 8)
        return max(1, full + bool(last and stands_alone))

    @property
    def num_full_steps(self) -> int:
        """Global batches of an epoch that have exactly `global_batch_size` samples."""
        start, stop = self.bounds(self.steps_per_epoch - 1)
        return self.steps_per_epoch - (stop - start != self.global_batch_size)

    def bounds(self, step: int) -> tuple[int, int]:
        """Positions of a global batch in the epoch's order; IndexError if the epoch has no such step."""
        if not 0 <= step < self.steps_per_epoch:
            raise IndexError(f"step {step} of an epoch of {self.steps_per_epoch}")
        start = self.first_sample + step * self.global_batch_size
        last = step == self.steps_per_epoch - 1
        return start, self.num_samples if last else start + self.global_batch_size

    def sizes(self, step: int) -> tuple[int, ...]:
        """Samples of each rank's part of a global batch."""
        start, stop = self.bounds(step)
        if stop - start < self.world_size:
            return (stop - start,) * self.world_size
        return _sizes(stop - start, self.world_size, self.loads)

    def weight(self, step: int, rank: int) -> float:
        """Factor that makes the mean of the ranks' gradients the mean over the samples of the global batch."""
        sizes = self.sizes(step)
        return sizes[rank] * self.world_size / sum(sizes)

    def local(self, step: int, rank: int, order: Int64s, shards: Shards) -> Int64s:
        """Positions of a rank's part of a global batch: samples of its own shards first.

        A shard's owner is on the host that wrote it, where preparation had the same workers, and no other host needs
        the shard in its memory but for the few samples by which a batch is unevenly owned. `order` is that of the
        epoch (num_samples,).
        """
        start, stop = self.bounds(step)
        if self.world_size == 1 or stop - start < self.world_size:
            return np.arange(start, stop)
        owner_N = owner(shards(order[start:stop]), self.world_size)
        return start + np.flatnonzero(deal(owner_N, self.sizes(step)) == rank)


@dataclass(frozen=True)
class StepSchedule:
    """The samples of each step, also after a resume with another world size; steps are counted over all epochs."""

    plan: BatchPlan  # plan of whole epochs
    first_step: int = 0  # first step of this group, in `epoch`, at position `first_sample` of its order
    epoch: int = 0
    first_sample: int = 0

    @cached_property
    def _rest(self) -> BatchPlan:
        return replace(self.plan, first_sample=self.first_sample)

    def locate(self, step: int) -> tuple[int, BatchPlan, int]:
        """A step's epoch, how that is cut, and which cut the step is; ValueError if the step was another group's."""
        since = step - self.first_step
        if since < 0:
            raise ValueError(f"step {step} is before {self.first_step}, where this group begins")
        if since < self._rest.steps_per_epoch:
            return self.epoch, self._rest, since
        epochs, since = divmod(since - self._rest.steps_per_epoch, self.plan.steps_per_epoch)
        return self.epoch + 1 + epochs, self.plan, since

    def position(self, step: int) -> tuple[int, int]:
        """Position after so many steps: complete epochs, and samples of the next one."""
        epoch, plan, local = self.locate(step)
        return epoch, plan.bounds(local)[0]

    def samples(self, step: int) -> int:
        """Samples seen after so many steps, over all epochs."""
        epoch, position = self.position(step)
        return epoch * self.plan.num_samples + position

    def ends_epoch(self, step: int) -> bool:
        """Whether an epoch is over when so many steps are done."""
        return self.position(step)[1] == 0

    def epoch_end(self, step: int) -> int:
        """The first step from this one on after which an epoch is over."""
        _, plan, local = self.locate(step)
        return step if self.ends_epoch(step) else step + plan.steps_per_epoch - local

    def num_steps(self, num_epochs: int) -> int:
        """Steps of a training of so many epochs, steps of earlier groups included."""
        return self.first_step + self._rest.steps_per_epoch + (num_epochs - self.epoch - 1) * self.plan.steps_per_epoch

    def largest_part(self, rank: int) -> int:
        """Samples of a rank's largest part of any batch."""
        ends = ((plan, step) for plan in (self.plan, self._rest) for step in (0, plan.steps_per_epoch - 1))
        return max(plan.sizes(step)[rank] for plan, step in ends)

    def even_step(self, step: int) -> float:
        """Fractional step for learning-rate schedules: as if all steps had this group's batch size."""
        epoch, position = self.position(step)
        local = min(position / self.plan.global_batch_size, self.plan.steps_per_epoch - 1)
        return epoch * self.plan.steps_per_epoch + local

    @property
    def num_past_steps(self) -> int:
        """Steps of the current epoch that were done when this group started; all of them at the end of an epoch."""
        return self.plan.steps_per_epoch - (self._rest.steps_per_epoch if self.first_sample else 0)
