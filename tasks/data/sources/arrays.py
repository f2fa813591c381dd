"""Images in tables: of NumPy (.npz with `images` and `labels`), Zarr (groups of those) and Parquet (`image`, `label`).

A root is one such file or Zarr store, or a folder of them, all of one kind. Their names, or the folders or groups that
they lie in, begin with the split (`train.npz`, `test-00000-of-00002.parquet`, `validation/0.npz`, `all.zarr/train`).
Listing reads labels and headers; `array_rows` reads the pixels. Nothing is unpickled.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from paceline.conf.data import Data
from paceline.tasks.data.listing import SPLITS, Origin, SampleListing, SplitName, check_classes, complete_splits
from paceline.tasks.data.samples import SamplesBuilder
from paceline.tasks.data.sources import folder
from paceline.tasks.data.sources.array_rows import NPZ, PARQUET, ZARR, Table, open_table, stored_groups
from paceline.tasks.data.storage import s3
from paceline.tasks.errors import InputError, one_line

RUN = 256
"""Neighbouring rows that a shard of the training split gets together: they were written, and are read, together."""


class _File(NamedTuple):
    path: str
    size: int
    stamp: str
    split: SplitName | None
    table: Table


def list_samples(data: Data) -> SampleListing:
    """List the rows of all files."""
    root = str(data.root)
    base, entries, ignored = _find_files(root)
    files = [_open(root, base, *entry) for entry in entries]
    channels = {file.table.channels for file in files}
    if len(channels) > 1:
        raise InputError(f"data.root={root}: some files hold grey images and others coloured ones; give all the same")
    class_names, labels_of = _classes(root, files)
    folder.check_split_names(root, [file.path for file in files])
    builders = {split: SamplesBuilder() for split in SPLITS}
    for file in files:
        builder, size = builders[file.split or "train"], file.size // max(1, len(file.table.labels))
        for row, value in enumerate(file.table.labels.tolist()):
            builder.add(file.path, labels_of[value], size, file.stamp, row)
    if not len(builders["train"]):
        raise InputError(f"data.root={root}: no file of the training split holds an image; name one train{NPZ}")
    splits = complete_splits({split: builder.build() for split, builder in builders.items() if len(builder)}, data)
    check_classes(splits[0], class_names, f"data.root={root}")
    origin = Origin("arrays", folder.absolute(base))
    return SampleListing(origin, class_names, *splits, channels=channels.pop(), run=RUN, ignored=ignored)


def _find_files(root: str) -> tuple[str, list[tuple[str, int, str]], dict[str, int]]:
    """The folder, its files of one kind (path, size, stamp), and the other ones by suffix."""
    filesystem, path = folder.reach_root(root)
    name = path.rpartition("/")[2]
    is_file = filesystem.isfile(path)
    is_store = folder.suffix_of(name) == ZARR
    base = root.rstrip("/")[: -len(name)] or "." if is_file or is_store else root
    suffixes = frozenset({NPZ, PARQUET})
    if is_store and not filesystem.isdir(path):
        raise InputError(f"data.root={root}: is not a folder; give an unpacked Zarr store, or a folder of them")
    if is_file and folder.suffix_of(name) not in suffixes:
        raise InputError(
            f"data.root={root}: is neither {NPZ} nor {PARQUET} nor {ZARR}; give such a file, or a folder of them"
        )
    if is_store or not is_file:
        stores = [name] if is_store else _stores(filesystem, root, path)
        if stores:
            return base, [group for store in stores for group in _groups(filesystem, root, base, store)], {}
    if is_file:
        info = filesystem.info(path)
        return base, [(name, int(info["size"] or 0), folder.stamp_of(info) or base)], {}
    tree = folder.read_tree(root, suffixes)
    files = [(sample.path, sample.size, sample.stamp) for sample in tree.files]
    kinds = Counter(folder.suffix_of(path) for path, _, _ in files)
    if len(kinds) != 1:
        raise InputError(
            f"data.root={root}: holds {kinds[NPZ]} files {NPZ} and {kinds[PARQUET]} files {PARQUET}; "
            "it needs some, and of one kind"
        )
    return base, files, dict(sorted(tree.ignored.items()))


def _stores(filesystem: Any, root: str, path: str) -> list[str]:
    """Names of the Zarr stores in a folder, whose chunks are not to be listed as files of it."""
    entries = filesystem.ls(path, detail=True) if filesystem.isdir(path) else []
    names = sorted(str(entry["name"]).rstrip("/").rpartition("/")[2] for entry in entries)
    stores = [name for name in names if folder.suffix_of(name) == ZARR]
    tables = [name for name in names if folder.suffix_of(name) in (NPZ, PARQUET)]
    if stores and tables:
        raise InputError(f"data.root={root}: holds {stores[0]} and {tables[0]}; it needs tables of one kind")
    return stores


def _groups(filesystem: Any, root: str, base: str, store: str) -> list[tuple[str, int, str]]:
    """Path, bytes and stamp of each table in a Zarr store; the stamp is of the names, sizes and stamps of its files."""
    try:
        paths = stored_groups(base, store)
    except InputError as error:
        raise InputError(f"data.root={root}: {store}: {error}") from error
    groups = []
    for path in paths:
        files = filesystem.find(folder.below(folder.open_root(base)[1], path), detail=True)
        digest = hashlib.sha256()
        for name in sorted(files):
            digest.update(
                f"{name.rpartition(path)[2]}\0{files[name]['size']}\0{folder.stamp_of(files[name]) or base}\n".encode()
            )
        groups.append((path, sum(int(info["size"] or 0) for info in files.values()), digest.hexdigest()))
    return groups


def _open(root: str, base: str, path: str, size: int, stamp: str) -> _File:
    try:
        table = open_table(base, path)
    except InputError as error:
        raise InputError(f"data.root={root}: {path}: {error}") from error
    except OSError:
        raise
    except Exception as error:  # readers raise anything on hostile bytes
        if s3.is_of_store(error):
            raise
        raise InputError(f"data.root={root}: {path} cannot be read ({one_line(error)}); write it again") from error
    return _File(path, size, stamp, folder.split_in_name(path), table)


def _classes(root: str, files: Sequence[_File]) -> tuple[tuple[str, ...], dict[Any, int]]:
    """Class names in the order of their values, and the number of each value."""
    unordered = {value for file in files for value in np.unique(file.table.labels).tolist()}
    if len({isinstance(value, str) for value in unordered}) > 1:
        raise InputError(f"data.root={root}: some labels are numbers and others words; give all the same")
    values = sorted(unordered)
    named = {file.table.class_names for file in files if file.table.class_names}
    if len(named) > 1:
        raise InputError(
            f"data.root={root}: files name different classes, or in another order; give all the same names"
        )
    names = next(iter(named), ())
    if not names:
        return tuple(map(str, values)), {value: number for number, value in enumerate(values)}
    outside = [value for value in values if isinstance(value, str) or not 0 <= value < len(names)]
    if outside:
        raise InputError(
            f"data.root={root}: label {outside[0]} is none of the {len(names)} classes from 0 that the file names; "
            "correct its labels or names"
        )
    return names, {number: number for number in range(len(names))}
