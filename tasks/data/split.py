"""One split of a prepared set, memory-mapped."""

import math
import mmap
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from paceline.tasks.data.listing import SplitName

# Shape suffixes: N samples, H height, W width, C channels, T targets.


@dataclass(frozen=True, eq=False)
class Split:
    """One split; images stay on disk until they are gathered."""

    name: SplitName
    images: list[npt.NDArray[np.uint8]]  # one NHWC memory map per shard, in order
    labels_N: npt.NDArray[np.int64]
    targets_NT: npt.NDArray[np.float32] | None
    image_shape: tuple[int, int, int]

    @property
    def num_samples(self) -> int:
        """Samples over all shards."""
        return len(self.labels_N)

    @cached_property
    def _starts(self) -> npt.NDArray[np.int64]:
        return np.cumsum([0, *map(len, self.images)], dtype=np.int64)

    @cached_property
    def _arrays(self) -> list[npt.NDArray[np.uint8]]:
        # Plain views: indexing np.memmap itself wraps every result, at 10 microseconds a time.
        return [np.asarray(shard) for shard in self.images]

    def image(self, index: int) -> npt.NDArray[np.uint8]:
        """One image (H, W, C) as a view of its shard."""
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        view: npt.NDArray[np.uint8] = self._arrays[shard][index - self._starts[shard]]
        return view

    def shards_of(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The numbers (n,) of the shards that hold samples (n,)."""
        return np.searchsorted(self._starts, indices, side="right") - 1

    def gather(self, indices: npt.NDArray[np.int64], out: npt.NDArray[np.uint8] | None = None) -> npt.NDArray[np.uint8]:
        """Copy samples (n, H, W, C) in the given order, to `out` or a new array; IndexError for an index outside."""
        if out is None:
            out = np.empty((len(indices), *self.image_shape), dtype=np.uint8)
        if len(indices) == 0:
            return out
        if indices.min() < 0 or indices.max() >= self.num_samples:
            raise IndexError(f"indices from {indices.min()} to {indices.max()} in a split of {self.num_samples}")
        if len(self._arrays) == 1:
            return np.take(self._arrays[0], indices, axis=0, out=out, mode="clip")
        gathered = np.empty_like(out)
        out[self.gather_by_shard(indices, gathered)] = gathered
        return out

    def gather_by_shard(self, indices: npt.NDArray[np.int64], out: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
        """Copy samples (n, H, W, C) to `out` in the order of their shards; returns their places in `indices` (n,)."""
        shard_of = self.shards_of(indices)
        order = np.argsort(shard_of, kind="stable")
        shards, firsts = np.unique(shard_of[order], return_index=True)
        for shard, start, stop in zip(shards, firsts, [*firsts[1:], len(indices)], strict=True):
            local = indices[order[start:stop]] - self._starts[shard]
            np.take(self._arrays[shard], local, axis=0, out=out[start:stop], mode="clip")
        return order

    def advise(self, start: int, stop: int, advice: int) -> None:
        """Advise the kernel on the samples from `start` to `stop`, such as to read them in the background."""
        first, last = self.shards_of(np.array([start, stop - 1]))
        for shard in range(int(first), int(last) + 1):
            images = self.images[shard]
            if not (isinstance(images, np.memmap) and isinstance(images.base, mmap.mmap)):  # in memory
                continue
            begin, end = np.clip([start, stop], self._starts[shard], self._starts[shard + 1]) - self._starts[shard]
            aligned = (images.offset + self._first_byte(shard, int(begin))) // mmap.PAGESIZE * mmap.PAGESIZE
            images.base.madvise(advice, aligned, images.offset + self._first_byte(shard, int(end)) - aligned)

    def _first_byte(self, shard: int, number: int) -> int:
        """Of an image in its shard, or the end of the last one."""
        return number * math.prod(self.image_shape)


def owner(shards_N: npt.NDArray[np.int64], world_size: int) -> npt.NDArray[np.int64]:
    """The ranks (N,) that read training shards (N,) before others do; no function of hosts, so that results are not."""
    return shards_N % world_size


def first_reader(split: SplitName, shard: int, num_shards: int, world_size: int) -> int:
    """The rank that reads a shard of any split before others do; what is not trained on is shared in ranges."""
    if split == "train":
        return int(owner(np.array(shard), world_size))
    return shard * world_size // num_shards
