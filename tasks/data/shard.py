"""One shard of a prepared set: decode a chunk of samples and write it as `.npy` files.

This is what a worker runs. Knows nothing of Dask, of other shards, or of when a set is complete.
"""

from __future__ import annotations

import hashlib
import io
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from tasks.data import moments
from tasks.data.listing import Origin, Sample, SplitName
from tasks.data.moments import Moments
from tasks.data.pixels import read_pixels
from tasks.durable import write_durably
from tasks.errors import RunError
from tasks.records import Record

FILE_PATTERN = r"^(train|validation|test)/\d{5,}\.(images|labels|targets)\.npy$"
"""The only names a manifest may hold; none of them can lead out of its directory."""


@dataclass(frozen=True)
class Chunk:
    """The work of one task, as data."""

    origin: Origin
    split: SplitName
    number: int
    samples: tuple[Sample, ...]
    class_names: tuple[str, ...]
    image_size: int
    channels: int
    directory: str
    """The temporary set; shared by all workers and the caller."""


class ShardFile(Record):
    """One file of a shard."""

    name: Annotated[str, Field(pattern=FILE_PATTERN)]
    num_bytes: int
    sha256: str


class Rejected(Record):
    """A sample that cannot be used, and why."""

    path: str
    split: SplitName
    class_name: str
    reason: str


class ShardRecord(Record):
    """What a worker says of the shard it wrote. A chunk without a single good sample has no files."""

    split: SplitName
    number: int
    num_samples: int
    files: tuple[ShardFile, ...]
    class_counts: tuple[int, ...]
    moments: Moments
    rejected: tuple[Rejected, ...] = ()

    def file(self, kind: str) -> ShardFile | None:
        """The file of `images`, `labels` or `targets`."""
        return next((file for file in self.files if file.name.endswith(f".{kind}.npy")), None)


def write_shard(chunk: Chunk) -> ShardRecord:
    """Decode a chunk and write its files, each through a temporary name.

    Raises:
        RunError: The directory is not visible from this worker.
        OSError: The disk is full or cannot be written.
    """
    directory = Path(chunk.directory)
    if not directory.is_dir():
        raise RunError(
            f"{directory} does not exist on worker host {socket.gethostname()}; all workers write into one directory; "
            "put PACELINE_HOME on a file system that every host mounts under the same path"
        )
    images_NHWC, targets_NT, kept, reasons = read_pixels(chunk.origin, chunk.samples, chunk.image_size, chunk.channels)
    labels_N = np.array([chunk.samples[position].label for position in kept], dtype=np.int64)
    arrays: dict[str, npt.NDArray[Any]] = {"images": images_NHWC, "labels": labels_N}
    if targets_NT is not None:
        arrays["targets"] = targets_NT
    files = tuple(
        _write(directory, f"{chunk.split}/{chunk.number:05d}.{kind}.npy", array)
        for kind, array in arrays.items()
        if len(labels_N)
    )
    counts = np.bincount(labels_N, minlength=len(chunk.class_names))
    return ShardRecord(
        split=chunk.split,
        number=chunk.number,
        num_samples=len(labels_N),
        files=files,
        class_counts=tuple(int(count) for count in counts),
        moments=moments.of_images(images_NHWC),
        rejected=tuple(_reject(chunk, chunk.samples[position], reason) for position, reason in reasons.items()),
    )


def _reject(chunk: Chunk, sample: Sample, reason: str) -> Rejected:
    return Rejected(path=sample.text, split=chunk.split, class_name=chunk.class_names[sample.label], reason=reason)


def _write(directory: Path, name: str, array: npt.NDArray[Any]) -> ShardFile:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    content = buffer.getbuffer()
    write_durably(directory / name, content)
    return ShardFile(name=name, num_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
