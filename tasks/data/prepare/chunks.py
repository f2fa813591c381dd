"""Divides a listing into chunks, one for each shard, and these into portions, one for each task.

The borders of chunks are part of the fingerprint of a set, so they depend on the listing alone.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from paceline.conf.data import Data
from paceline.tasks.data.listing import SPLITS, Origin, SampleListing, SplitName
from paceline.tasks.data.prepare.photographs import form_of
from paceline.tasks.data.prepare.shard import Chunk
from paceline.tasks.data.samples import Samples
from paceline.tasks.data.sources.registry import spec_of
from paceline.tasks.data.split import first_reader

# Limits of a chunk, constants: shard borders, and with them the fingerprint, must not depend on the cluster.
MAX_FILES = 1_024  # the loaders shuffle blocks of 1,024 samples, each of which is to be a cross-section of the classes
MAX_ROWS = 8_192  # rows of arrays cost a fiftieth of a file
MIN_RUNS = 4  # fewest runs of a chunk, so that no chunk is more than a quarter larger than another
MAX_BYTES = 64 * 2**20  # encoded, and decoded

JPEG_RATIO = 8  # of the bytes of photographs as pixels to those as JPEG of quality 90, at 260 pixels

# Limits of a portion. Of the smallest files (CIFAR's) 4,096 are 150 to 200 ms of work, where Dask spends 5 on a task;
# of large ones a single chunk is seconds.
PORTION_FILES = 4_096
PORTION_BYTES = 32 * 2**20  # encoded and decoded together


class TaskChunks(NamedTuple):
    """The work of one task."""

    reader: int
    """The rank that reads these shards before others do; preparation has as many workers as it can have readers."""
    chunks: tuple[Chunk, ...]

    @property
    def key(self) -> str:
        """Key of the Dask task, without the suffix that makes it unique."""
        return f"{self.chunks[0].split}-{self.chunks[0].number}"


@dataclass(frozen=True)
class ChunkPlanner:
    """Cuts a listing for one prepared set."""

    listing: SampleListing
    data: Data
    directory: Path  # the temporary set; shared by all workers and the caller
    finished: frozenset[tuple[SplitName, int]] = frozenset()  # shards that are there already

    @cached_property
    def num_chunks(self) -> dict[SplitName, int]:
        """Chunks, and shards, of each split."""
        listing = self.listing
        return {split: chunks_of(listing.split(split), listing.origin, self._decoded_bytes) for split in SPLITS}

    def chunks(self) -> Iterator[Chunk]:
        """Every chunk, split by split."""
        for split in SPLITS:
            yield from (self._chunk(split, number) for number in range(self.num_chunks[split]))

    def portions(self, num_readers: int, num_threads: int) -> Iterator[TaskChunks]:
        """Chunks without a shard, in portions for their readers by turns; the last are small, so all end together."""
        listing = self.listing
        total_chunks = max(1, sum(self.num_chunks.values()))
        encoded = sum(int(listing.split(split).sizes.sum()) for split in SPLITS)
        bytes_of_chunk = max(1, (listing.num_samples * self._decoded_bytes + encoded) // total_chunks)
        files_of_chunk = max(1, listing.num_samples // total_chunks)
        most = max(1, min(PORTION_FILES // files_of_chunk, PORTION_BYTES // bytes_of_chunk))
        waiting: list[deque[tuple[SplitName, int]]] = [deque() for _ in range(num_readers)]
        for split, num_chunks in self.num_chunks.items():
            for number in range(num_chunks):
                if (split, number) not in self.finished:
                    waiting[first_reader(split, number, num_chunks, num_readers)].append((split, number))
        while any(waiting):
            for reader, queue in enumerate(waiting):
                if queue:
                    size = max(1, min(most, len(queue) // (2 * num_threads)))
                    yield TaskChunks(reader, tuple(self._chunk(*queue.popleft()) for _ in range(size)))

    @property
    def _decoded_bytes(self) -> int:
        return image_bytes(self.data, self.listing.channels + self.listing.num_planes)

    def _chunk(self, split: SplitName, number: int) -> Chunk:
        # Training samples are dealt out like cards, or in short runs, so that each shard has a share of every class.
        # The block shuffle of large sets draws whole blocks and relies on it.
        samples, num_chunks = self.listing.split(split), self.num_chunks[split]
        bounds = slice(len(samples) * number // num_chunks, len(samples) * (number + 1) // num_chunks)
        return Chunk(
            origin=self.listing.origin,
            split=split,
            number=number,
            samples=deal(samples, number, num_chunks, self.listing.run) if split == "train" else samples[bounds],
            class_names=self.listing.class_names,
            image_size=self.data.image_size,
            channels=self.listing.channels,
            num_planes=self.listing.num_planes,
            directory=str(self.directory),
            form=form_of(self.data),
        )


def image_bytes(data: Data, channels: int) -> int:
    """Bytes of a stored image, those of photographs and of JPEG as they usually are."""
    num_bytes = data.stored_side**2 * channels
    if data.keeps_aspect:
        num_bytes = num_bytes * 4 // 3  # most photographs are 4:3 or 3:2
    return max(1, num_bytes // JPEG_RATIO) if data.storage == "jpeg" else num_bytes


def deal(samples: Samples, number: int, num_chunks: int, run: int) -> Samples:
    """Samples of one chunk when they are dealt out one by one, or in runs where they suffice."""
    run = max(1, min(run, len(samples) // (MIN_RUNS * num_chunks)))
    if run == 1:
        return samples[number::num_chunks]
    return samples.take(np.flatnonzero(np.arange(len(samples)) // run % num_chunks == number))


def chunks_of(samples: Samples, origin: Origin, num_bytes: int) -> int:
    """Number of chunks for samples of `num_bytes` each when decoded."""
    most = MAX_ROWS if spec_of(origin).has_rows else MAX_FILES
    most = max(1, min(most, MAX_BYTES // num_bytes))
    encoded = int(samples.sizes.sum())
    return min(len(samples), max(-(-len(samples) // most), -(-encoded // MAX_BYTES)))
