"""Samples as columns: a million of them in 100 MB and not in 450, and a thousand of them sent in one piece."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from mmap import ACCESS_READ, mmap
from tempfile import SpooledTemporaryFile
from typing import Any, Literal, NamedTuple, TypeAlias, overload

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Block = bytes | bytearray | mmap
Numbers: TypeAlias = "Block | array[int]"  # quoted, for Python 3.11
MEMORY_BYTES = 32 * 2**20  # of a column that stays in memory: that of some million samples
_AT_ONCE = 1_000


class Sample(NamedTuple):
    """One sample: a file, or a row of an array that the source reads as a whole."""

    path: str  # relative to the root; for arrays the name of the array
    label: int
    size: int = 0  # encoded size, bytes; 0 for rows of arrays
    stamp: str = ""
    """Changes when the content does: modification time, etag or checksum. The root takes its place where there is none,
    or a file of this name and size in another place would be taken for this one."""
    row: int = -1  # row of the array; -1 for files

    @property
    def name(self) -> str:
        """Path and row, as in reports."""
        return self.path if self.row < 0 else f"{self.path}#{self.row}"

    @property
    def text(self) -> str:
        """The name where it must be text, as in JSON and Parquet: a POSIX name may be any bytes."""
        return self.name.encode(errors="surrogateescape").decode(errors="replace")


class File(NamedTuple):
    """One file, or a part of one, as it was listed."""

    path: str  # below the root; for a store of objects, bucket and key
    size: int = 0  # bytes, of the part; 0 where that is not known
    stamp: str = ""  # `Sample.stamp`, such as an ETag with its quotes; empty where it is not known
    start: int | None = None  # first byte of a part; None for the complete file


# Shape suffixes: H height, W width, C channels, T targets.

Picture = bytes | npt.NDArray[np.uint8]  # a file's content, or pixels (H, W, C), or (H, W) for one channel or a mask
Fit = Literal["scale", "crop"]
"""`scale`: scale the shorter side to the size and crop the middle. `crop`: crop the middle without scaling."""
Extent = Fit | Literal["side", "whole"]
"""`side`: scale the shorter side to the size and crop nothing. `whole`: the complete image at its own size."""


class Item(NamedTuple):
    """One sample."""

    picture: Picture | Exception
    """Image of any size; an exception where it cannot be read, which Paceline counts and lists."""
    mask: Picture | Exception | None = None  # the class of each pixel, from 0; 255 for none
    targets_T: npt.NDArray[np.float32] | None = None


class _Spool:
    """A column that is written piece by piece: in memory, or in a file without a name when it is large."""

    def __init__(self, stack: ExitStack) -> None:
        self._file = stack.enter_context(SpooledTemporaryFile(MEMORY_BYTES))  # noqa: SIM115 - the stack closes it
        self.num_bytes = 0

    def write(self, piece: Block | npt.NDArray[Any]) -> None:
        self.num_bytes += self._file.write(np.ascontiguousarray(piece).data if isinstance(piece, np.ndarray) else piece)

    def read(self) -> Block:
        """All of it; pages of a file that is mapped need no memory of this process, and stay when it is closed."""
        if self.num_bytes > MEMORY_BYTES:
            self._file.flush()
            return mmap(self._file.fileno(), 0, access=ACCESS_READ)
        self._file.seek(0)
        return self._file.read()


def _spool(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same array, in a file if it is large."""
    if array.nbytes <= MEMORY_BYTES:
        return array
    with ExitStack() as stack:
        spool = _Spool(stack)
        spool.write(array)
        return np.frombuffer(spool.read(), dtype=array.dtype)


def _chosen(array: npt.NDArray[Any], chosen: Indices | slice) -> npt.NDArray[Any]:
    return array[chosen] if isinstance(chosen, slice) else _spool(array[chosen])


@dataclass(eq=False, repr=False)
class StringColumn:
    """Strings end to end in one block of bytes; 16 bytes of overhead for each."""

    _block: Block
    _starts: Indices
    _ends: Indices

    @classmethod
    def from_bytes(cls, block: Block, borders: Numbers) -> StringColumn:
        """Strings end to end in a block; the borders (int64) start with 0."""
        borders_N = np.frombuffer(borders, dtype=np.int64)
        return cls(block, borders_N[:-1], borders_N[1:])

    def __getitem__(self, index: int) -> str:
        return self._block[self._starts[index] : self._ends[index]].decode(errors="surrogateescape")

    def __iter__(self) -> Iterator[str]:
        for start, end in zip(self._starts.tolist(), self._ends.tolist(), strict=True):
            # surrogateescape: a POSIX file name may be any bytes, and such a file is still a sample.
            yield self._block[start:end].decode(errors="surrogateescape")

    def any_empty(self) -> bool:
        """Whether one of them has no character."""
        return bool((self._starts == self._ends).any())

    def take(self, chosen: Indices | slice) -> StringColumn:
        """Some of them, in the same block."""
        return StringColumn(self._block, _chosen(self._starts, chosen), _chosen(self._ends, chosen))

    def __reduce__(self) -> tuple[Any, ...]:
        """A few strings of a large block travel without the others."""
        block, borders = self._compact()
        return StringColumn.from_bytes, (bytes(block), borders.tobytes())

    def _compact(self) -> tuple[Block, Indices]:
        """A block of these strings alone, and their borders, from 0."""
        lengths = self._ends - self._starts
        borders = np.concatenate([[0], np.cumsum(lengths)])
        block = self._block
        if len(block) != borders[-1] or not np.array_equal(borders[:-1], self._starts):
            # All their bytes by one gather; a slice for each string takes three times as long.
            places = np.repeat(self._starts - borders[:-1], lengths)
            places += np.arange(borders[-1])
            block = np.frombuffer(block, dtype=np.uint8).take(places).tobytes()
        return block, borders


@dataclass(eq=False, repr=False)
class Samples(Sequence[Sample]):
    """A sequence of samples, held as columns. Parts of it share the columns of the whole."""

    paths: StringColumn
    labels: npt.NDArray[np.int32]
    sizes: Indices
    stamps: StringColumn
    rows: Indices | None  # None for files

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> Samples:
        """Convert samples to columns."""
        if isinstance(samples, Samples):
            return samples
        builder = SamplesBuilder()
        for sample in samples:
            builder.add(*sample)
        return builder.build()

    @classmethod
    def join(cls, parts: Iterable[Samples]) -> Samples:
        """All samples of the parts, one part after the other; all files or all rows. Large columns lie on disk."""
        with ExitStack() as stack:
            paths, path_borders, stamps, stamp_borders, labels, sizes, rows = (_Spool(stack) for _ in range(7))
            texts = ((paths, path_borders), (stamps, stamp_borders))
            for _, borders in texts:
                borders.write(np.zeros(1, dtype=np.int64))
            for part in parts:
                for column, (block, borders) in zip((part.paths, part.stamps), texts, strict=True):
                    written, inner_borders = column._compact()
                    borders.write(block.num_bytes + inner_borders[1:])
                    block.write(written)
                labels.write(part.labels)
                sizes.write(part.sizes)
                if part.rows is not None:
                    rows.write(part.rows)
            columns = [StringColumn.from_bytes(block.read(), borders.read()) for block, borders in texts]
            all_rows = rows.read() if rows.num_bytes else None
            return cls.from_bytes(columns[0], labels.read(), sizes.read(), columns[1], all_rows)

    def __len__(self) -> int:
        return len(self.labels)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> Samples: ...
    def __getitem__(self, index: int | slice) -> Sample | Samples:
        if isinstance(index, slice):
            return self.take(index)
        row = -1 if self.rows is None else int(self.rows[index])
        return Sample(self.paths[index], int(self.labels[index]), int(self.sizes[index]), self.stamps[index], row)

    def __iter__(self) -> Iterator[Sample]:
        for part in self.blocks():
            rows = [-1] * len(part) if part.rows is None else part.rows.tolist()
            columns = part.paths, part.labels.tolist(), part.sizes.tolist(), part.stamps, rows
            # Sample._make without a frame for each
            yield from map(partial(tuple.__new__, Sample), zip(*columns, strict=True))

    def blocks(self) -> Iterator[Samples]:
        """Yield the samples in pieces, to limit how many exist as objects."""
        for start in range(0, len(self), _AT_ONCE):
            yield self.take(slice(start, start + _AT_ONCE))

    def names(self) -> Iterator[str]:
        """`Sample.name` of each sample."""
        if self.rows is None:
            return iter(self.paths)
        return (f"{path}#{row}" for path, row in zip(self.paths, self.rows, strict=True))

    def lines(self) -> Iterator[bytes]:
        """A line for each sample, many at once, for a hash."""
        for part in self.blocks():
            columns = part.names(), part.labels.tolist(), part.sizes.tolist(), part.stamps
            lines = [f"{name}\0{label}\0{size}\0{stamp}\n" for name, label, size, stamp in zip(*columns, strict=True)]
            yield "".join(lines).encode(errors="surrogateescape")

    def take(self, chosen: Indices | slice) -> Samples:
        """Some of the samples, in the given order."""
        rows = None if self.rows is None else _chosen(self.rows, chosen)
        labels, sizes = _chosen(self.labels, chosen), _chosen(self.sizes, chosen)
        return Samples(self.paths.take(chosen), labels, sizes, self.stamps.take(chosen), rows)

    def with_labels(self, labels: npt.NDArray[np.int32]) -> Samples:
        """The same samples with other labels."""
        return Samples(self.paths, _spool(labels), self.sizes, self.stamps, self.rows)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle few pieces: each array that is sent on its own costs Dask more than its bytes."""
        rows = None if self.rows is None else self.rows.tobytes()
        return Samples.from_bytes, (self.paths, self.labels.tobytes(), self.sizes.tobytes(), self.stamps, rows)

    @classmethod
    def from_bytes(
        cls, paths: StringColumn, labels: Numbers, sizes: Numbers, stamps: StringColumn, rows: Numbers | None
    ) -> Samples:
        """Samples whose numbers are in blocks of bytes, such as pickled ones."""
        labels_N, sizes_N = np.frombuffer(labels, dtype=np.int32), np.frombuffer(sizes, dtype=np.int64)
        return cls(paths, labels_N, sizes_N, stamps, None if rows is None else np.frombuffer(rows, dtype=np.int64))


class SamplesBuilder:
    """Takes samples one by one and keeps none of them as an object."""

    def __init__(self) -> None:
        self._paths, self._path_borders = bytearray(), array("q", [0])
        self._stamps, self._stamp_borders = bytearray(), array("q", [0])
        self._labels, self._sizes, self._rows = array("i"), array("q"), array("q")

    def __len__(self) -> int:
        return len(self._labels)

    def add(self, path: str, label: int, size: int = 0, stamp: str = "", row: int = -1) -> None:
        """Add a sample; the arguments are those of `Sample`."""
        self._paths += path.encode(errors="surrogateescape")
        self._stamps += stamp.encode()
        self._path_borders.append(len(self._paths))
        self._stamp_borders.append(len(self._stamps))
        self._sizes.append(size)
        self._labels.append(label)
        if row >= 0:
            self._rows.append(row)

    def build(self) -> Samples:
        """Return the samples as columns; raise a ValueError if files and rows of arrays were mixed."""
        if len(self._rows) not in (0, len(self)):
            raise ValueError(f"{len(self._rows)} of {len(self)} samples are rows of arrays; use all or none")
        paths = StringColumn.from_bytes(self._paths, self._path_borders)
        stamps = StringColumn.from_bytes(self._stamps, self._stamp_borders)
        return Samples.from_bytes(paths, self._labels, self._sizes, stamps, self._rows or None)
