"""Images in tables: of NumPy (.npz with `images` and `labels`), Zarr (groups of those) and Parquet (`image`, `label`).

A root is one such file or Zarr store, or a folder of them, all of one kind. Their names, or the folders or groups that
they lie in, begin with the split (`train.npz`, `test-00000-of-00002.parquet`, `validation/0.npz`, `all.zarr/train`).
Listing reads labels and headers; `array_rows` reads the pixels. Nothing is unpickled.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from paceline.conf.data import Data
from paceline.tasks.data.listing import Origin, SampleListing, SplitName
from paceline.tasks.data.samples import Item, Sample, Samples, SamplesBuilder
from paceline.tasks.data.sources import array_rows, folder
from paceline.tasks.data.sources.array_rows import NPZ, PARQUET, ZARR, Table, open_table, stored_groups
from paceline.tasks.data.storage import s3
from paceline.tasks.errors import InputError, one_line

RUN = 256
"""Neighbouring rows that a shard of the training split gets together: they were written, and are read, together."""


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
    return ("zarr" if array_rows.kind_of(listing.train.paths[0]) == ZARR else "pyarrow",)


def read(origin: Origin, samples: Samples, image_size: int) -> Iterator[Item]:
    """Read the images of rows."""
    return map(Item, array_rows.read_rows(origin.root, samples))


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
        paths = stored_groups(base, store)
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
        return open_table(base, path)
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
