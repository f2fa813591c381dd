"""One split of a prepared set, memory-mapped."""

import mmap
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.tasks.data.listing import SplitName
from paceline.tasks.data.prepare import manifest
from paceline.tasks.data.prepare.shard import Shard
from paceline.tasks.errors import RunError, one_line
from paceline.tasks.records.data import PreparedSet

# Shape suffixes: N samples, H height, W width, C channels, T targets.


@dataclass(frozen=True, eq=False)
class Split:
    """One split; images stay on disk until they are gathered."""

    name: SplitName
    images: list[np.memmap[tuple[int, int, int, int], np.dtype[np.uint8]]]  # one NHWC memory map per shard, in order
    labels_N: npt.NDArray[np.int64]
    targets_NT: npt.NDArray[np.float32] | None
    image_shape: tuple[int, int, int]

    @property
    def num_samples(self) -> int:
        """Samples over all shards."""
        return len(self.labels_N)

    @cached_property
    def _starts(self) -> npt.NDArray[np.int64]:
        return np.cumsum([0, *(len(shard) for shard in self.images)], dtype=np.int64)

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

    def will_need(self, start: int, stop: int) -> None:
        """Have the kernel read samples from `start` to `stop` in the background."""
        self._advise(start, stop, mmap.MADV_WILLNEED)

    def done_with(self, start: int, stop: int) -> None:
        """Let go of the memory of samples from `start` to `stop`; they can be read again."""
        self._advise(start, stop, mmap.MADV_DONTNEED)

    def _advise(self, start: int, stop: int, advice: int) -> None:
        first, last = self.shards_of(np.array([start, stop - 1]))
        for shard in range(int(first), int(last) + 1):
            images = self.images[shard]
            if not isinstance(images.base, mmap.mmap):  # in memory
                continue
            begin, end = np.clip([start, stop], self._starts[shard], self._starts[shard + 1]) - self._starts[shard]
            size = images[0].nbytes
            aligned = (images.offset + int(begin) * size) // mmap.PAGESIZE * mmap.PAGESIZE
            images.base.madvise(advice, aligned, images.offset + int(end) * size - aligned)


def owner(shards_N: npt.NDArray[np.int64], world_size: int) -> npt.NDArray[np.int64]:
    """The ranks (N,) that read training shards (N,) before others do; no function of hosts, so that results are not."""
    return shards_N % world_size


def first_reader(split: SplitName, shard: int, num_shards: int, world_size: int) -> int:
    """The rank that reads a shard of any split before others do; what is not trained on is shared in ranges."""
    if split == "train":
        return int(owner(np.array(shard), world_size))
    return shard * world_size // num_shards


def open_split(prepared: PreparedSet, split: SplitName) -> Split:
    """Open one split of a prepared set; RunError if the set does not match its manifest."""
    path = Path(prepared.path)
    try:
        facts = manifest.read(path)
    except manifest.DamagedError as error:
        raise RunError(f"prepared set {path}: {error}; run again to prepare it again") from error

    def load(kind: str, dtype: type[np.generic], shape: tuple[int, ...]) -> list[Any]:
        return [_load(path, shard, kind, dtype, shape) for shard in facts.of_split(split)]

    num_targets = len(facts.target_names)
    no_targets = np.empty((0, num_targets), dtype=np.float32)
    try:
        labels_N = np.concatenate([np.empty(0, dtype=np.int64), *load("labels", np.int64, ())])
        if labels_N.size and not 0 <= labels_N.min() <= labels_N.max() < len(facts.class_names):
            raise manifest.DamagedError(f"a label of {split} is outside of its {len(facts.class_names)} classes")
        images = load("images", np.uint8, facts.image_shape)
        targets = [no_targets, *load("targets", np.float32, (num_targets,))] if num_targets else []
        return Split(split, images, labels_N, np.concatenate(targets) if targets else None, facts.image_shape)
    except manifest.DamagedError as error:
        raise RunError(f"prepared set {path}: {error}; remove the set and run again to prepare it") from error


def _load(path: Path, shard: Shard, kind: str, dtype: type[np.generic], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    file = shard.file(kind)
    if file is None:
        raise manifest.DamagedError(f"shard {shard.number} of {shard.split} has no {kind}")
    try:
        array: npt.NDArray[Any] = np.load(path / file.name, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise manifest.DamagedError(f"{file.name} is not an array of numbers ({one_line(error)[:200]})") from error
    if array.dtype != dtype or array.shape != (shard.num_samples, *shape):
        raise manifest.DamagedError(
            f"{file.name} holds {array.dtype} {array.shape}, not {np.dtype(dtype)} {(shard.num_samples, *shape)}"
        )
    return array
