"""Images in tables: of NumPy (.npz with `images` and `labels`), Zarr (groups of those) and Parquet (`image`, `label`).

A root is one such file or Zarr store, or a folder of them, all of one kind. Their names, or the folders or groups that
they lie in, begin with the split (`train.npz`, `test-00000-of-00002.parquet`, `validation/0.npz`, `all.zarr/train`).
Listing reads labels and headers. Of a compressed .npz everything before a row is read too, as a stream. Nothing is
unpickled. `parquet_rows` and `zarr_rows` are imported on use, because their libraries take up to half a second.
"""

import hashlib
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import groupby
from types import ModuleType
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.conf.data import Data
from paceline.tasks.data.decode.transform import MAX_PIXELS, DecodeError
from paceline.tasks.data.listing import Origin, SampleListing, SplitName
from paceline.tasks.data.samples import Item, Sample, Samples, SamplesBuilder
from paceline.tasks.data.sources import folder
from paceline.tasks.data.storage import s3
from paceline.tasks.errors import InputError, one_line

NPZ, PARQUET, ZARR = ".npz", ".parquet", ".zarr"
IMAGES, LABELS, CLASS_NAMES = "images", "labels", "class_names"
BLOCK_BYTES = 2**20
MAX_LABEL_BYTES = 2**30
COLOURS = 3
RUN = 256  # neighbouring rows that a training shard gets together: they were written, and are read, together
Row = bytes | npt.NDArray[np.uint8]  # an encoded image, or its pixels (H, W, C)


class Table(NamedTuple):
    """The content of a file without its pixels."""

    labels: npt.NDArray[Any]  # whole numbers, or words
    channels: int
    class_names: tuple[str, ...]  # names of the labels from 0; empty where the file lacks them


def list_samples(data: Data) -> SampleListing:
    """List the rows of all files."""
    root = str(data.root)
    base, files, ignored = _find_files(root)
    tables = [_open(root, base, file.path) for file in files]
    channels = {table.channels for table in tables}
    if len(channels) > 1:
        raise InputError(f"data.root={root}: some files hold grey images and others coloured ones; give all the same")
    class_names, labels_of = _classes(root, tables)
    split_names = folder.splits_in_names(root, [file.path for file in files])
    builders: dict[SplitName, SamplesBuilder] = {split: SamplesBuilder() for split in split_names}
    for file, table, split in zip(files, tables, split_names, strict=True):
        for row, value in enumerate(table.labels.tolist()):
            builders[split].add(file.path, labels_of[value], file.size // len(table.labels), file.stamp, row)
    splits = {split: builder.build() for split, builder in builders.items() if len(builder)}
    if "train" not in splits:
        raise InputError(f"data.root={root}: no file of the training split holds an image; name one train{NPZ}")
    origin = Origin("arrays", folder.absolute(base))
    return SampleListing.of(data, origin, class_names, splits, ignored, channels=channels.pop(), run=RUN)


def libraries(listing: SampleListing) -> tuple[str, ...]:
    """Package that decodes the files."""
    return ("zarr" if kind_of(listing.train.paths[0]) == ZARR else "pyarrow",)


def read(origin: Origin, samples: Samples, image_size: int) -> Iterator[Item]:
    """Read the images of rows."""
    return map(Item, read_rows(origin.root, samples))


def _find_files(root: str) -> tuple[str, list[Sample], Counter[str]]:
    """The folder, its files of one kind, and the other ones by suffix."""
    filesystem, path = folder.reach_root(root)
    name, suffixes = path.rpartition("/")[2], frozenset({NPZ, PARQUET})
    is_store = folder.suffix_of(name) == ZARR
    if is_store and not filesystem.isdir(path):
        raise InputError(f"data.root={root}: is not a folder; give an unpacked Zarr store, or a folder of them")
    if filesystem.isfile(path) and folder.suffix_of(name) not in suffixes:
        fault = f"is neither {NPZ} nor {PARQUET} nor {ZARR}"
        raise InputError(f"data.root={root}: {fault}; give such a file, or a folder of them")
    stores = [name] if is_store else _stores(filesystem, root, path)
    if stores:
        base = root.rstrip("/")[: -len(name)] or "." if is_store else root
        return base, [group for store in stores for group in _groups(filesystem, root, base, store)], Counter()
    base, files, ignored = folder.find_files(root, suffixes)
    kinds = Counter(folder.suffix_of(file.path) for file in files)
    if len(kinds) != 1:
        held = f"{kinds[NPZ]} files {NPZ} and {kinds[PARQUET]} files {PARQUET}"
        raise InputError(f"data.root={root}: holds {held}; it needs some, and of one kind")
    return base, files, ignored


def _stores(filesystem: Any, root: str, path: str) -> list[str]:
    """Names of the Zarr stores in a folder, whose chunks are not to be listed as files of it."""
    entries = filesystem.ls(path, detail=True) if filesystem.isdir(path) else []
    names = sorted(str(entry["name"]).rstrip("/").rpartition("/")[2] for entry in entries)
    stores = [name for name in names if folder.suffix_of(name) == ZARR]
    tables = [name for name in names if folder.suffix_of(name) in (NPZ, PARQUET)]
    if stores and tables:
        raise InputError(f"data.root={root}: holds {stores[0]} and {tables[0]}; it needs tables of one kind")
    return stores


def _groups(filesystem: Any, root: str, base: str, store: str) -> list[Sample]:
    """The tables in a Zarr store; the stamp of each is of the names, sizes and stamps of its files."""
    try:
        paths = [f"{store}/{group}".rstrip("/") for group in _module(store).groups(base, store)]
    except InputError as error:
        raise InputError(f"data.root={root}: {store}: {error}") from error
    groups = []
    for path in paths:
        files = filesystem.find(folder.below(folder.open_root(base)[1], path), detail=True)
        digest, num_bytes = hashlib.sha256(), 0
        for name, info in sorted(files.items()):
            stamp = folder.stamp_of(info) or base
            digest.update(f"{name.rpartition(path)[2]}\0{info['size']}\0{stamp}\n".encode())
            num_bytes += int(info["size"] or 0)
        groups.append(Sample(path, 0, num_bytes, digest.hexdigest()))
    return groups


def _open(root: str, base: str, path: str) -> Table:
    try:
        table: Table = _npz_table(base, path) if kind_of(path) == NPZ else _module(path).table(base, path)
        labels = table.labels
        if labels.ndim != 1 or labels.dtype.kind not in "iubU":
            raise InputError(f"labels are {labels.dtype} {labels.shape}; give one whole number or word for each image")
        return table
    except InputError as error:
        raise InputError(f"data.root={root}: {path}: {error}") from error
    except OSError:
        raise
    except Exception as error:  # readers raise anything on hostile bytes
        if s3.is_of_store(error):
            raise
        raise InputError(f"data.root={root}: {path} cannot be read ({one_line(error)}); write it again") from error


def _classes(root: str, tables: Sequence[Table]) -> tuple[tuple[str, ...], dict[Any, int]]:
    """Class names in the order of their values, and the number of each value."""
    unordered = {value for table in tables for value in np.unique(table.labels).tolist()}
    if len({isinstance(value, str) for value in unordered}) > 1:
        raise InputError(f"data.root={root}: some labels are numbers and others words; give all the same")
    values = sorted(unordered)
    named = {table.class_names for table in tables if table.class_names}
    if len(named) > 1:
        fault = "files name different classes, or in another order"
        raise InputError(f"data.root={root}: {fault}; give all the same names")
    names = next(iter(named), ())
    if not names:
        return tuple(map(str, values)), {value: number for number, value in enumerate(values)}
    outside = [value for value in values if isinstance(value, str) or not 0 <= value < len(names)]
    if outside:
        fault = f"label {outside[0]} is none of the {len(names)} classes from 0 that the file names"
        raise InputError(f"data.root={root}: {fault}; correct its labels or names")
    return names, {number: number for number in range(len(names))}


def channels_of(shape: tuple[int, ...], dtype: np.dtype[Any], *, is_fortran: bool = False) -> int:
    """Number of channels of the images of an array; InputError if it does not hold images."""
    (channels,) = shape[3:4] or (1,)
    if len(shape) not in (3, 4) or channels not in (1, COLOURS) or 0 in shape or is_fortran:
        form = f"{shape} in Fortran's order" if is_fortran else f"{shape}"
        fix = "give (images, height, width) or (images, height, width, 1 or 3)"
        raise InputError(f"{IMAGES} has the shape {form}; {fix}")
    if shape[1] * shape[2] > MAX_PIXELS:
        raise InputError(f"images of {shape[1]} x {shape[2]} pixels; up to {MAX_PIXELS} are understood")
    if dtype not in (np.uint8, np.uint16, np.bool_):
        raise InputError(f"{IMAGES} holds {dtype}, whose range is not defined; give 8 or 16 bits without a sign")
    return channels


def in_eight_bits(values_HWC: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Convert pixels of 8 or 16 bits or truth values to 8 bits; 16 bits by value, as for image files."""
    if values_HWC.dtype == np.uint16:
        return ((values_HWC.astype(np.uint32) + 128) // 257).astype(np.uint8)
    return values_HWC.astype(np.uint8) * np.uint8(255) if values_HWC.dtype == np.bool_ else values_HWC


def read_rows(root: str, samples: Samples) -> Iterator[Row | DecodeError]:
    """Images of rows, in the given order, by file and row; InputError if a file has changed."""
    assert samples.rows is not None
    pairs = zip(samples.paths, samples.rows.tolist(), strict=True)
    for path, members in groupby(pairs, key=lambda pair: pair[0]):
        rows = [row for _, row in members]
        try:
            yield from _npz_rows(root, path, rows) if kind_of(path) == NPZ else _module(path).rows(root, path, rows)
        except OSError as error:
            if error.errno is not None:
                raise
            raise OSError(f"{root}: {path}: {one_line(error)}") from error  # Arrow's, of a damaged page or of a network
        except (InputError, MemoryError, ValueError, zipfile.BadZipFile, zlib.error) as error:  # ValueError: Arrow's
            message = f"{root}: {path}: rows cannot be read ({one_line(error)}); write the file again"
            raise InputError(message) from error


def _module(path: str) -> ModuleType:
    return import_module(f"paceline.tasks.data.sources.{kind_of(path).removeprefix('.')}_rows")


def kind_of(path: str) -> str:
    """Kind of file by its suffix; a group within a Zarr store has the kind of the store."""
    is_group = any(part.lower().endswith(ZARR) for part in path.split("/"))
    return ZARR if is_group else NPZ if path.lower().endswith(NPZ) else PARQUET


def open_file(root: str, path: str) -> IO[bytes]:
    """Open a file for reading."""
    filesystem, base = folder.open_root(root)
    stream: IO[bytes] = filesystem.open(folder.below(base, path), "rb")
    return stream


def _npz_table(root: str, path: str) -> Table:
    with open_file(root, path) as stream, zipfile.ZipFile(stream) as archive:
        names = {name.removesuffix(".npy") for name in archive.namelist()}
        if not {IMAGES, LABELS} <= names:
            held = ", ".join(sorted(names)) or "nothing"
            raise InputError(f"holds {held}; it needs the arrays {IMAGES} and {LABELS}")
        with archive.open(f"{IMAGES}.npy") as member:
            shape, dtype, row_bytes = _image_header(member)
            num_bytes = archive.getinfo(f"{IMAGES}.npy").file_size - member.tell()
        if num_bytes != shape[0] * row_bytes:
            raise InputError(f"{IMAGES} of the shape {shape} has {num_bytes} bytes; write the file again")
        labels = _small_array(archive, LABELS)
        words = _small_array(archive, CLASS_NAMES) if CLASS_NAMES in names else np.zeros(0, dtype=np.str_)
    if labels.shape[:1] != shape[:1]:
        raise InputError(f"has {shape[0]} images and {len(labels)} labels; give one label for each image")
    return Table(labels, channels_of(shape, dtype), tuple(map(str, words.tolist())))


def _small_array(archive: zipfile.ZipFile, name: str) -> npt.NDArray[Any]:
    info = archive.getinfo(f"{name}.npy")
    if info.file_size > MAX_LABEL_BYTES:
        raise InputError(f"{name} has {info.file_size} bytes; up to {MAX_LABEL_BYTES} are understood")
    with archive.open(info) as member:
        return np.lib.format.read_array(member, allow_pickle=False)


def _image_header(member: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Shape and type of the images, and the bytes of one."""
    version = np.lib.format.read_magic(member)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read(member)
    channels_of(shape, dtype, is_fortran=is_fortran)
    return shape, dtype, int(np.prod(shape[1:])) * dtype.itemsize


def _npz_rows(root: str, path: str, rows: Sequence[int]) -> Iterator[Row]:
    name = f"{IMAGES}.npy"
    with open_file(root, path) as stream, zipfile.ZipFile(stream) as archive, archive.open(name) as member:
        shape, dtype, row_bytes = _image_header(member)
        info, source, start = archive.getinfo(name), member, member.tell()
        # What a member skips in one go it leaves in part as a tail, which every later read copies: at most 1 MiB.
        member.MAX_SEEK_READ = BLOCK_BYTES  # type: ignore[attr-defined]
        if info.compress_type == zipfile.ZIP_STORED:
            # In the file itself: before Python 3.13 a member reads what it skips. The last two numbers of the local
            # header are the lengths of a name and of an extra field.
            stream.seek(info.header_offset)
            lengths = np.frombuffer(_exactly(stream, 30)[26:], dtype="<u2")
            source, start = stream, start + info.header_offset + 30 + int(lengths.sum())
        for row in rows:
            source.seek(start + row * row_bytes)
            content = np.frombuffer(_exactly(source, row_bytes), dtype)
            yield in_eight_bits(content.reshape(*shape[1:3], -1))


def _exactly(stream: IO[bytes], number: int) -> bytes:
    content = stream.read(number)
    if len(content) != number:
        raise InputError(f"{IMAGES} ends before its last image; write the file again")
    return content
