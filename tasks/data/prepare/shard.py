"""One shard of a prepared set: decode a chunk of samples and write it as `.npy` files."""

import hashlib
import io
import socket
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field, NonNegativeInt

from paceline.tasks.cluster.hardware import usable_cores
from paceline.tasks.data.decode.pixels import Pixels, read_pixels
from paceline.tasks.data.listing import Origin, SplitName
from paceline.tasks.data.prepare import moments
from paceline.tasks.data.prepare.moments import Moments
from paceline.tasks.data.prepare.photographs import Form, Photographs, read_photographs
from paceline.tasks.data.samples import Samples
from paceline.tasks.data.storage import read_files as reading
from paceline.tasks.errors import RunError
from paceline.tasks.files import write_pieces
from paceline.tasks.records.data import Reads
from paceline.tasks.records.record import Record

LOOK_SECONDS = 1.0  # between checks whether the preparation still runs
FILE_PATTERN = r"^(train|validation|test)/\d{5,}\.(images|shapes|labels|targets)\.npy$"
"""The only names a manifest may hold; none of them can lead out of its directory."""


@dataclass(frozen=True)
class Chunk:
    """The work for one shard, as data."""

    origin: Origin
    split: SplitName
    number: int
    samples: Samples
    class_names: tuple[str, ...]
    image_size: int
    channels: int  # channels of an image
    num_planes: int
    directory: str  # the temporary set; shared by all workers and the caller
    form: Form | None = None  # of the images; None for squares of pixels


class ShardFile(Record):
    """One file of a shard."""

    name: Annotated[str, Field(pattern=FILE_PATTERN)]
    num_bytes: NonNegativeInt
    sha256: str


class Rejected(Record):
    """A sample that cannot be used, and why."""

    path: str
    split: SplitName
    class_name: str
    reason: str


class Shard(Record):
    """One shard, as the manifest lists it. Of a chunk without a single good sample it has no files."""

    split: SplitName
    number: NonNegativeInt
    num_samples: NonNegativeInt
    files: tuple[ShardFile, ...]

    def file(self, kind: str) -> ShardFile | None:
        """The file of `images`, `shapes`, `labels` or `targets`."""
        return next((file for file in self.files if file.name.endswith(f".{kind}.npy")), None)


class ShardRecord(Shard):
    """A worker's report on a shard that it wrote."""

    class_counts: tuple[int, ...]
    moments: Moments
    rejected: tuple[Rejected, ...] = ()
    reads: Reads = Reads()


def write_shards(chunks: Sequence[Chunk], sharing: int = 0) -> list[ShardRecord]:
    """Decode chunks and write their files, each through a temporary name; RunError where their directory is not seen.

    `sharing` tasks at a time share the cores of a host, all of which decode; 0 for one thread. While one shard is
    written the next one is decoded, so that at most two are in memory.
    """
    records, num_threads = [], max(1, usable_cores() // sharing) if sharing else 1
    with ThreadPoolExecutor(1, thread_name_prefix="paceline-shard") as disk:
        writing: Future[ShardRecord] | None = None
        for chunk in chunks:
            decoded = _decode(chunk, num_threads)
            if writing is not None:
                records.append(writing.result())
            writing = disk.submit(_write, chunk, *decoded)
            del decoded  # the second in memory is the one that is being written
        if writing is not None:
            records.append(writing.result())
    return records


def _decode(chunk: Chunk, num_threads: int) -> tuple[Pixels | Photographs, Reads]:
    directory, next_look, num_classes = Path(chunk.directory), 0.0, len(chunk.class_names)

    def check_directory() -> None:
        """Stop a task whose preparation has ended: its temporary set is gone then."""
        nonlocal next_look
        if time.monotonic() < next_look:
            return
        next_look = time.monotonic() + LOOK_SECONDS
        if not directory.is_dir():
            fault = f"{directory} does not exist on worker host {socket.gethostname()}"
            fix = "put PACELINE_HOME on a file system that every host mounts under the same path"
            raise RunError(f"{fault}; all workers write into one directory; {fix}")

    check_directory()
    given, num_channels = (chunk.origin, chunk.samples), chunk.channels + chunk.num_planes
    with reading.count_reads() as tally:
        if chunk.form is not None:
            return read_photographs(*given, chunk.form, num_channels, check_directory, num_threads), tally.reads
        decoded = read_pixels(*given, chunk.image_size, num_channels, check_directory, num_threads)
    if not chunk.num_planes:
        return decoded, tally.reads
    largest_N = decoded.images_NHWC[..., -1].max(axis=(1, 2), initial=0)
    reasons = {
        position: f"its mask holds {largest - 1}, and the set has {num_classes} classes from 0"
        for position, largest in zip(decoded.positions, largest_N.tolist(), strict=True)
        if largest > num_classes
    }
    if reasons:
        positions = [position for position in decoded.positions if position not in reasons]
        decoded = Pixels(decoded.images_NHWC[largest_N <= num_classes], None, positions, decoded.reasons | reasons)
    return decoded, tally.reads


def _write(chunk: Chunk, decoded: Pixels | Photographs, reads: Reads) -> ShardRecord:
    positions, reasons = decoded.positions, decoded.reasons
    labels_N = chunk.samples.labels[positions].astype(np.int64)
    arrays: dict[str, npt.NDArray[Any]]
    if isinstance(decoded, Photographs):
        arrays = {"images": decoded.content, "shapes": decoded.shapes_N3, "labels": labels_N}
        channel_moments = moments.of_sums(decoded.sums_3C)
    else:
        arrays = {"images": decoded.images_NHWC, "labels": labels_N}
        channel_moments = moments.of_images(decoded.images_NHWC)
        if decoded.targets_NT is not None:
            arrays["targets"] = decoded.targets_NT
    directory, name = Path(chunk.directory), f"{chunk.split}/{chunk.number:05d}"
    written = arrays.items() if len(labels_N) else ()
    files = tuple(_write_array(directory, f"{name}.{kind}.npy", array) for kind, array in written)
    if chunk.num_planes:  # pixels of each class, where these have one
        counts = np.bincount(arrays["images"][..., -1].ravel(), minlength=1 + len(chunk.class_names))[1:]
    else:
        counts = np.bincount(labels_N, minlength=len(chunk.class_names))
    rejected = tuple(
        Rejected(path=sample.text, split=chunk.split, class_name=chunk.class_names[sample.label], reason=reason)
        for sample, reason in zip(chunk.samples.take(np.array([*reasons], int)), reasons.values(), strict=True)
    )
    return ShardRecord(
        split=chunk.split,
        number=chunk.number,
        num_samples=len(labels_N),
        files=files,
        class_counts=tuple(counts.tolist()),
        moments=channel_moments,
        rejected=rejected,
        reads=reads,
    )


def _write_array(directory: Path, name: str, array: npt.NDArray[Any]) -> ShardFile:
    # As np.save would write it, but without a copy of the pixels.
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, np.lib.format.header_data_from_array_1_0(array))
    pieces = (head.getvalue(), array.data)
    write_pieces(directory / name, pieces)
    digest = hashlib.sha256(pieces[0])
    digest.update(array.data)
    return ShardFile(name=name, num_bytes=len(pieces[0]) + array.nbytes, sha256=digest.hexdigest())
