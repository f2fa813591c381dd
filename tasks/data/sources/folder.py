"""Class-named folders of files on anything that fsspec reads: `root/{train,val,test}/<class>/*`, or `root/<class>/*`.

Only names and sizes are read. Decoding finds out whether a file has the format of its name.
"""

import os
import re
import stat
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import fsspec
import numpy as np

from paceline.conf.data import Data
from paceline.conf.environment import Environment
from paceline.tasks.data.listing import SPLITS, Origin, SampleListing, SplitName
from paceline.tasks.data.partitions import has_workers, list_partitions, refuse_shared
from paceline.tasks.data.samples import Sample, Samples, SamplesBuilder
from paceline.tasks.data.storage import cache, s3
from paceline.tasks.errors import InputError, one_line

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".bmp", ".dib", ".gif", ".tif", ".tiff"})
IMAGE_SUFFIXES |= {".webp", ".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".avif", ".tga"}
_THROUGH_DASK = re.compile(r"(?:^|::)dask(?:::|://)")
"""fsspec's protocol, alone or in a chain, that unpickles what the scheduler in the URL sends."""
_NAMES_SHOWN = 5
_CACHED_VERSION = 1  # of a cached listing
_SETTLED_SECONDS = 2.0
"""Age of a folder from which its time is trusted: a later change within the same tick of a file system's clock (2 s on
FAT, less elsewhere) leaves the time as it is."""
_STAMPS = (
    *("ETag", "etag", "md5Hash", "mtime", "LastModified", "updated", "created"),
    *("CRC", "date_time", "modify", "modificationTime", "sha", "hex"),
)
"""Keys of fsspec's file systems for a value that changes with the content, most specific first. A value that is 0 or
empty does not count, such as a missing time in an archive."""
SPLIT_FOLDERS: dict[str, SplitName] = {"val": "validation", "valid": "validation", "validation": "validation"}
SPLIT_FOLDERS |= {"train": "train", "test": "test"}
_SPLIT_PREFIX = re.compile(r"(train|validation|valid|val|test)(?![a-z])")
Place = tuple[SplitName, str]  # the split and the class that a folder belongs to


class Kind(NamedTuple):
    """A kind of files in class-named folders."""

    noun: str
    suffixes: frozenset[str]
    origin: str
    channels: int  # channels of their images


IMAGES = Kind("image", IMAGE_SUFFIXES, "files", 3)


@dataclass
class Tree:
    """Everything below a root that is not hidden."""

    files: Samples  # files with a recognised suffix, in order of their paths. The label is the number of the folder.
    folders: tuple[str, ...]
    ignored: Counter[str]  # the other files, by suffix
    real_folders: list[str] = field(default_factory=list)  # on this disk, without links


@dataclass
class _TreeBuilder:
    """A tree while it is being read."""

    root: str
    base: str  # path of the root
    suffixes: frozenset[str]
    files: SamplesBuilder = field(default_factory=SamplesBuilder)
    folders: dict[str, int] = field(default_factory=dict)
    ignored: Counter[str] = field(default_factory=Counter)
    visited: set[str] = field(default_factory=set)  # real paths of local folders

    def add(self, folder: int, path: str, size: int, stamp: str) -> None:
        suffix = suffix_of(path)
        if suffix in self.suffixes:
            self.files.add(path, folder, size, stamp)
        else:
            self.ignored[suffix or "(none)"] += 1

    def number(self, folder: str) -> int:
        existing = self.folders.get(folder)
        if existing is None:
            if folder:  # object stores have no folders of their own
                self.number(folder.rpartition("/")[0])
            existing = self.folders[folder] = len(self.folders)
        return existing

    def walk_local(self, folder: str) -> None:
        """Read a local folder in order of the whole paths; unlike fsspec's own walk, this follows linked folders."""
        number = self.number(folder)
        path = directory = f"{self.base}/{folder}" if folder else self.base
        real = os.path.realpath(path)
        if real in self.visited:  # a link back up the tree
            return
        self.visited.add(real)
        descriptor = None
        try:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            with os.scandir(descriptor) as entries:  # a slash after the names of folders; nothing hidden is a sample
                names = [f"{item.name}/" if item.is_dir() else item.name for item in entries if item.name[0] != "."]
            for name in sorted(names):
                inside, path = f"{folder}/{name}" if folder else name, f"{directory}/{name}"
                if name.endswith("/"):
                    self.walk_local(inside[:-1])
                    continue
                # Relative to the open folder: the kernel need not walk the whole path for each of a million files.
                status = os.stat(name, dir_fd=descriptor)
                # Reading a pipe would wait for ever.
                if not stat.S_ISREG(status.st_mode) or not os.access(name, os.R_OK, dir_fd=descriptor):
                    raise PermissionError(path)
                self.add(number, inside, status.st_size, str(status.st_mtime_ns))
        except OSError as error:
            fault = f"{path} cannot be read by this user; all samples must be readable"
            raise InputError(f"data.root={self.root}: {fault}; change its permissions or remove it") from error
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def walk_remote(self, filesystem: Any, top: str) -> None:
        if top:
            self.number(top)
        start = below(self.base, top) if top else self.base
        for path, info in sorted(filesystem.find(start, detail=True, withdirs=True).items()):
            relative = path[len(self.base) :].strip("/")
            if not relative or any(part.startswith(".") for part in relative.split("/")):
                continue
            if info["type"] == "directory":
                self.number(relative)
            else:
                folder, stamp = self.number(relative.rpartition("/")[0]), stamp_of(info) or self.root
                self.add(folder, relative, int(info["size"] or 0), stamp)


def list_samples(data: Data, kind: Kind = IMAGES, tree: Tree | None = None, num_frames: int = 0) -> SampleListing:
    """List class-named folders of a kind, or a tree of them; InputError if the root or its layout is wrong."""
    root = str(data.root)
    tree = tree or read_tree(root, kind.suffixes, data.trust_directory_times)
    top = {folder for folder in tree.folders if "/" not in folder}
    if "test" in top and "train" not in top:
        raise InputError(f"data.root={root}: has test/ but no train/; name the training folder train/")
    split_folders = {name: split for name, split in SPLIT_FOLDERS.items() if "train" in top and name in top}
    validation = sorted(name for name, split in split_folders.items() if split == "validation")
    if len(validation) > 1:
        fault = f"has {' and '.join(validation)}, which mean the same split"
        raise InputError(f"data.root={root}: {fault}; keep one of them")
    places = [_place(folder, split_folders) for folder in tree.folders]
    class_names = _class_names(root, tree, places, split_folders, kind)
    files, labels = tree.files, {name: label for label, name in enumerate(class_names)}
    split_of = np.array([SPLITS.index(place[0]) if place else -1 for place in places], dtype=np.int8)[files.labels]
    label_of = np.array([labels[place[1]] if place else -1 for place in places], dtype=np.int32)[files.labels]
    splits: dict[SplitName, Samples] = {}
    for number, split in enumerate(SPLITS):
        chosen = np.flatnonzero(split_of == number)
        chosen = chosen[np.argsort(label_of[chosen], kind="stable")]
        if len(chosen) or split == "train":
            splits[split] = files.take(chosen).with_labels(label_of[chosen])
    ignored = tree.ignored + Counter(suffix_of(path) for path in files.paths.take(np.flatnonzero(split_of < 0)))
    origin = Origin(kind.origin, absolute(root), signal=data.used_signal, num_frames=num_frames)
    channels = kind.channels * max(1, num_frames)
    return SampleListing.of(data, origin, class_names, splits, ignored, channels=channels)


def _place(folder: str, splits: dict[str, SplitName]) -> Place | None:
    """Split and class of a folder, however deep it lies in the folder of its class."""
    parts = folder.split("/") if folder else []
    if not splits:
        return ("train", parts[0]) if parts else None
    return (splits[parts[0]], parts[1]) if len(parts) > 1 and parts[0] in splits else None


def suffix_of(path: str) -> str:
    """Suffix of a file's name in lower case, with its dot; empty without one."""
    _, dot, extension = path.rpartition("/")[2].rpartition(".")
    return (dot + extension).lower() if dot else ""


def splits_in_names(root: str, paths: Sequence[str]) -> list[SplitName]:
    """The split that starts each name, or a folder's around it; `train` if none has one, InputError if only some do."""

    def split_of(path: str) -> SplitName | None:
        named = (_SPLIT_PREFIX.match(part) for part in path.lower().split("/"))
        return next((SPLIT_FOLDERS[match[1]] for match in named if match), None)

    splits = [split_of(path) for path in paths]
    unnamed = [path for path, split in zip(paths, splits, strict=True) if split is None]
    if 0 < len(unnamed) < len(paths):
        lost = f"{unnamed[0]} is named after no split, and other files are"
        raise InputError(f"data.root={root}: {lost}; name or remove it")
    return [split or "train" for split in splits]


def find_files(root: str, suffixes: frozenset[str]) -> tuple[str, list[Sample], Counter[str]]:
    """A folder, its files with one of the suffixes, and its other files by suffix; the root may be the one file."""
    filesystem, path = reach_root(root)
    name = path.rpartition("/")[2]
    if filesystem.isfile(path) and suffix_of(name) in suffixes:
        base, info = root.rstrip("/")[: -len(name)] or ".", filesystem.info(path)
        return base, [Sample(name, 0, int(info["size"] or 0), stamp_of(info) or base)], Counter()
    tree = read_tree(root, suffixes)
    return root, list(tree.files), tree.ignored


def _class_names(
    root: str, tree: Tree, places: list[Place | None], splits: dict[str, SplitName], kind: Kind
) -> tuple[str, ...]:
    filled = {places[number] for number in np.unique(tree.files.labels)}

    def some(names: set[str]) -> str:
        listed, num_more = sorted(names), len(names) - _NAMES_SHOWN
        return (", ".join(listed[:_NAMES_SHOWN]) + (f" and {num_more} more" if num_more > 0 else "")) or "none"

    for folder, place in sorted(zip(tree.folders, places, strict=True)):
        if place and folder.count("/") == (1 if splits else 0) and place not in filled:
            fix = f"add {kind.noun}s or remove the folder (recognised: {' '.join(sorted(kind.suffixes))})"
            fault = f"folder {folder}/ holds no {kind.noun}; every class needs at least one"
            raise InputError(f"data.root={root}: {fault}; {fix}")
    classes = {split: {place[1] for place in filled if place and place[0] == split} for split in SPLITS}
    train = classes["train"]
    for name, split in splits.items():
        if classes[split] != train:
            fault = f"only in {name}/: {some(classes[split] - train)}; only in train/: {some(train - classes[split])}"
            fix = "give both the same class folders"
            raise InputError(f"data.root={root}: the classes of {name}/ and train/ differ: {fault}; {fix}")
    return tuple(sorted(train))


def read_tree(root: str, suffixes: frozenset[str] = IMAGE_SUFFIXES, trust_times: bool = False) -> Tree:
    """Read everything below a root; files with one of the suffixes are samples.

    `trust_times`: reuse the listing of local folders whose times are those of the last listing. InputError if the root
    is missing, a file, empty, or holds something unreadable.
    """
    filesystem, path = reach_root(root)
    if not filesystem.exists(path):
        raise InputError(f"data.root={root}: does not exist; give the folder that holds the class folders")
    if filesystem.isfile(path):
        raise InputError(f"data.root={root}: is a file; give the folder that holds the class folders")
    # Of a remote store one long listing is quicker than many short ones, unless workers share them.
    in_partitions = is_local(filesystem) or has_workers()
    tree = _read_partitions(root, suffixes, trust_times) if in_partitions else None
    tree = tree or _read_below(root, suffixes, "", trust_times)
    if not tree.files and not tree.ignored:
        raise InputError(f"data.root={root}: is empty; give the folder that holds the class folders")
    return tree


def _read_below(root: str, suffixes: frozenset[str], top: str, trust_times: bool = False) -> Tree:
    """The tree below one folder.

    With `trust_times`, the listing of an earlier run is valid while the times of the folders stay. The time of a folder
    changes when a name is added, removed or replaced in it, and not when a file is overwritten in place.
    """
    filesystem, base = open_root(root)
    builder = _TreeBuilder(root, base, suffixes)
    if not is_local(filesystem):
        builder.walk_remote(filesystem, top)
        return Tree(builder.files.build(), tuple(builder.folders), builder.ignored)
    started = time.time()
    key = cache.key_of("folders", _CACHED_VERSION, os.path.realpath(base), base, sorted(suffixes), top)
    if trust_times and (recalled := cache.recall(key)) is not None:
        times, files, folders, ignored = recalled
        with suppress(OSError):
            if all(Path(folder).stat().st_mtime_ns == stamp for folder, stamp in times.items()):
                samples = Samples.of(Sample(*file) for file in files)
                return Tree(samples, tuple(folders), Counter(ignored), sorted(times))
    above = {os.path.realpath(below(base, str(parent))) for parent in PurePosixPath(top).parents}
    builder.visited |= above
    builder.walk_local(top)
    tree = Tree(builder.files.build(), tuple(builder.folders), builder.ignored, sorted(builder.visited - above))
    if trust_times:
        with suppress(OSError):
            times = {folder: Path(folder).stat().st_mtime_ns for folder in tree.real_folders}
            # Not where a folder changed a moment ago.
            if times and max(times.values()) < (started - _SETTLED_SECONDS) * 1e9:
                cache.remember(key, [times, list(tree.files), tree.folders, tree.ignored])
    return tree


def _read_partitions(root: str, suffixes: frozenset[str], trust_times: bool = False) -> Tree | None:
    """The tree by class folders, which workers read, in one process's order; None for one, or images beside it."""
    filesystem, path = open_root(root)
    tops, ignored, partitions = [""], Counter[str](), list[str]()
    for top in tops:
        for name in _entries(filesystem, below(path, top) if top else path):
            if not name.endswith("/"):
                ignored[suffix_of(name) or "(none)"] += 1
            elif not top and name[:-1] in SPLIT_FOLDERS and filesystem.exists(below(path, "train")):
                tops.append(name[:-1])
            else:
                partitions.append(f"{top}/{name}" if top else name)
    if len(partitions) <= 1 or not suffixes.isdisjoint(ignored):
        return None
    partitions.sort()
    folders, listed_by = dict.fromkeys(tops), dict[str, str]()

    def samples() -> Iterator[Samples]:
        """The samples of one partition after the other, so that no more than one need be in memory."""
        read = partial(_read_below, root, suffixes, trust_times=trust_times)
        listed = list_partitions(read, [name[:-1] for name in partitions])
        numbers = {folder: number for number, folder in enumerate(folders)}
        for name, tree in zip(partitions, listed, strict=True):
            refuse_shared(root, listed_by, name, tree.real_folders)
            ignored.update(tree.ignored)
            number_of = [numbers.setdefault(folder, len(numbers)) for folder in tree.folders]
            folders.update(dict.fromkeys(tree.folders))
            yield tree.files.with_labels(np.array(number_of, dtype=np.int32)[tree.files.labels])

    return Tree(Samples.join(samples()), tuple(folders), ignored)


def _entries(filesystem: Any, path: str) -> list[str]:
    """Names in a folder but hidden ones, those of folders with a slash."""
    if is_local(filesystem):
        with os.scandir(path) as entries:
            names = [f"{entry.name}/" if entry.is_dir() else entry.name for entry in entries]
    else:
        infos = {info["name"].rstrip("/"): info["type"] for info in filesystem.ls(path, detail=True)}
        infos.pop(path.rstrip("/"), None)  # the marker of a folder on an object store
        names = [name.rpartition("/")[2] + ("/" if kind == "directory" else "") for name, kind in infos.items()]
    return [name for name in names if not name.startswith(".")]


def open_root(root: str) -> tuple[Any, str]:
    """The file system and the path on it that a root names; InputError if fsspec cannot read such a URL here."""
    if _THROUGH_DASK.search(root):
        fix = "give the place of the files themselves"
        raise InputError(f"data.root={root}: fsspec would join a Dask scheduler, which can send code; {fix}")
    try:
        filesystem, path = fsspec.core.url_to_fs(root, **(s3.options() if s3.is_s3(root) else {}))
    except (ValueError, ImportError, OSError) as error:
        package = "pip install 'paceline[s3]'" if s3.is_s3(root) else "install what fsspec needs for this protocol"
        message = f"data.root={root}: cannot be opened ({one_line(error)}); give a path, or {package}"
        raise InputError(message) from error
    return filesystem, str(path)


def reach_root(root: str) -> tuple[Any, str]:
    """Open a root and check the access to an object store; InputError if the store refuses."""
    filesystem, path = open_root(root)
    if s3.is_s3(root):
        cache.limit_of(Environment().cache_gib_given)
        s3.check_access(root, filesystem, path)
    return filesystem, path


def below(base: str, path: str) -> str:
    """The path of what lies below the path of a root, which is empty for the root of an archive."""
    return f"{base.rstrip('/')}/{path}" if base else path


def absolute(root: str) -> str:
    """A local root as an absolute path: workers may have been started in another directory."""
    filesystem, path = open_root(root)
    return path if is_local(filesystem) else root


def is_local(filesystem: Any) -> bool:
    """Whether files can be opened by the operating system."""
    protocol = filesystem.protocol
    return "file" in ((protocol,) if isinstance(protocol, str) else protocol)


def stamp_of(info: dict[str, Any]) -> str:
    """A value that changes with the content of a file, such as its time; empty where the file system has none."""
    return next((str(info[key]) for key in _STAMPS if info.get(key)), "")
