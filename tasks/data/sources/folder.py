"""Class-named folders of images on anything that fsspec reads.

`root/{train,test}/<class>/*`, also with `val`, or `root/<class>/*`. Looks at names and sizes only: whether a file
really is an image is the transform's business.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec

from conf.schema import Data
from tasks.data.listing import Origin, Sample, SampleListing, SplitName, check_classes, hold_out
from tasks.errors import InputError

IMAGE_SUFFIXES: frozenset[str] = frozenset(
    {
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".bmp", ".dib", ".gif", ".tif", ".tiff", ".webp"),
        *(".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".avif", ".tga"),
    }
)
_NAMES_SHOWN = 5
_STAMPS = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "updated", "created")
"""What file systems of fsspec call the thing that changes with the content; the first that is there is taken."""
SPLIT_FOLDERS: dict[str, SplitName] = {
    "train": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "test": "test",
}


@dataclass(frozen=True)
class _File:
    path: str
    """Relative to the root, with forward slashes."""
    size: int
    stamp: str


@dataclass
class _Tree:
    """Everything below the root that is not hidden."""

    files: list[_File] = field(default_factory=list)
    folders: set[str] = field(default_factory=set)


def list_samples(data: Data) -> SampleListing:
    """List class-named folders.

    Raises:
        InputError: The root or its layout is wrong; the message says how to mend it.
    """
    root = str(data.root)
    tree = read_tree(root)
    top = {folder for folder in tree.folders if "/" not in folder}
    if "test" in top and "train" not in top:
        raise InputError(f"data.root={root}: has test/ but no train/; name the training folder train/")
    splits = {name: split for name, split in SPLIT_FOLDERS.items() if "train" in top and name in top}
    _check_one_validation_folder(root, splits)
    found, ignored = _group(tree, splits)
    class_names = _class_names(root, tree, found, splits)
    return _build(data, found, class_names, ignored)


def _build(
    data: Data, found: dict[SplitName, dict[str, list[_File]]], class_names: tuple[str, ...], ignored: dict[str, int]
) -> SampleListing:
    where = f"data.root={data.root}"
    labels = {name: label for label, name in enumerate(class_names)}
    samples = {
        split: tuple(
            Sample(file.path, labels[name], file.size, file.stamp)
            for name in class_names
            for file in sorted(classes.get(name, []), key=lambda file: file.path)
        )
        for split, classes in found.items()
    }
    train, test, validation = samples["train"], samples.get("test", ()), samples.get("validation", ())
    if "test" not in samples:
        train, test = hold_out(train, data.test_fraction)
    if "validation" not in samples:
        train, validation = hold_out(train, data.validation_fraction)
    check_classes(train, class_names, where)
    return SampleListing(
        Origin("files", absolute(str(data.root))), class_names, train, validation, test, channels=3, ignored=ignored
    )


def _check_one_validation_folder(root: str, splits: dict[str, SplitName]) -> None:
    names = sorted(name for name, split in splits.items() if split == "validation")
    if len(names) > 1:
        raise InputError(f"data.root={root}: has {' and '.join(names)}, which mean the same split; keep one of them")


def _group(tree: _Tree, splits: dict[str, SplitName]) -> tuple[dict[SplitName, dict[str, list[_File]]], dict[str, int]]:
    """Sort files by split and class; count those that are no samples by suffix."""
    found: dict[SplitName, dict[str, list[_File]]] = {split: {} for split in splits.values()} or {"train": {}}
    ignored: Counter[str] = Counter()
    depth = 1 if splits else 0
    for file in tree.files:
        parts = file.path.split("/")
        suffix = suffix_of(file.path)
        belongs = len(parts) > depth + 1 and (not splits or parts[0] in splits)
        if suffix not in IMAGE_SUFFIXES or not belongs:
            ignored[suffix or "(none)"] += 1
            continue
        split: SplitName = splits[parts[0]] if splits else "train"
        found[split].setdefault(parts[depth], []).append(file)
    return found, dict(sorted(ignored.items()))


def suffix_of(path: str) -> str:
    """The last suffix of a file's name in lower case, with its dot; empty without one."""
    _, dot, extension = path.rpartition("/")[2].rpartition(".")
    return (dot + extension).lower() if dot else ""


def _class_names(
    root: str, tree: _Tree, found: dict[SplitName, dict[str, list[_File]]], splits: dict[str, SplitName]
) -> tuple[str, ...]:
    """The sorted classes, after checking that no class folder is empty and that all splits agree."""
    for folder in sorted(tree.folders):
        parts = folder.split("/")
        split: SplitName | None = splits.get(parts[0]) if splits else "train"
        if split is not None and len(parts) == (2 if splits else 1) and parts[-1] not in found[split]:
            raise InputError(
                f"data.root={root}: folder {folder}/ holds no image; every class needs at least one; "
                f"add images or remove the folder (recognised: {' '.join(sorted(IMAGE_SUFFIXES))})"
            )
    train = set(found["train"])
    for name, split in splits.items():
        if set(found[split]) != train:
            raise InputError(
                f"data.root={root}: the classes of {name}/ and train/ differ: only in {name}/: "
                f"{_some(set(found[split]) - train)}; only in train/: {_some(train - set(found[split]))}; "
                "give both the same class folders"
            )
    return tuple(sorted(train))


def _some(names: set[str]) -> str:
    listed = sorted(names)
    return (
        ", ".join(listed[:_NAMES_SHOWN])
        + (f" and {len(listed) - _NAMES_SHOWN} more" if len(listed) > _NAMES_SHOWN else "")
        or "none"
    )


def read_tree(root: str) -> _Tree:
    """Everything below a root.

    Raises:
        InputError: The root is missing, a file, empty, or holds something unreadable.
    """
    filesystem, path = open_root(root)
    if not filesystem.exists(path):
        raise InputError(f"data.root={root}: does not exist; give the folder that holds the class folders")
    if filesystem.isfile(path):
        raise InputError(f"data.root={root}: is a file; give the folder that holds the class folders")
    tree = _Tree()
    entries = _walk_local(root, Path(path)) if is_local(filesystem) else _walk_remote(filesystem, path)
    for entry in entries:
        relative = entry if isinstance(entry, str) else entry.path
        if any(part.startswith(".") for part in relative.split("/")):
            continue
        if isinstance(entry, str):
            tree.folders.add(entry)
        else:
            tree.files.append(entry)
            parent = entry.path.rpartition("/")[0]
            while parent and parent not in tree.folders:  # object stores have no folders of their own
                tree.folders.add(parent)
                parent = parent.rpartition("/")[0]
    if not tree.files:
        raise InputError(f"data.root={root}: is empty; give the folder that holds the class folders")
    tree.files.sort(key=lambda file: file.path)
    return tree


def open_root(root: str) -> tuple[Any, str]:
    """The file system and the path on it that a root names.

    Raises:
        InputError: fsspec cannot read such a URL here.
    """
    try:
        filesystem, path = fsspec.core.url_to_fs(root)
    except (ValueError, ImportError, OSError) as error:
        raise InputError(
            f"data.root={root}: cannot be opened ({' '.join(str(error).split())}); "
            "give a path, or install the package that fsspec needs for this protocol"
        ) from error
    return filesystem, str(path)


def absolute(root: str) -> str:
    """A local root as an absolute path: workers may have been started in another directory."""
    filesystem, path = open_root(root)
    return path if is_local(filesystem) else root


def is_local(filesystem: Any) -> bool:
    """Whether files can be opened by the operating system."""
    protocol = filesystem.protocol
    return "file" in ((protocol,) if isinstance(protocol, str) else protocol)


def _walk_local(root: str, base: Path) -> Iterator[str | _File]:
    """Walk a local folder; unlike fsspec's own walk, it follows linked folders and has times in nanoseconds."""
    seen: set[str] = set()

    def refuse(error: OSError) -> None:
        raise _unreadable(root, str(error.filename))

    for folder, subfolders, names in os.walk(base, followlinks=True, onerror=refuse):
        real = os.path.realpath(folder)
        if real in seen:  # a link back up the tree
            subfolders.clear()
            continue
        seen.add(real)
        relative = Path(folder).relative_to(base).as_posix()
        prefix = "" if relative == "." else relative + "/"
        yield from (prefix + name for name in subfolders)
        for name in names:
            path = f"{folder}/{name}"
            # Hidden files are not samples, so nobody minds when they cannot be read.
            if name.startswith("."):
                continue
            try:
                status = os.stat(path)  # noqa: PTH116 - twice as fast as Path.stat, and there may be millions
            except OSError as error:
                raise _unreadable(root, path) from error
            # Reading a pipe would wait for ever.
            if not stat.S_ISREG(status.st_mode) or not os.access(path, os.R_OK):
                raise _unreadable(root, path)
            yield _File(prefix + name, status.st_size, str(status.st_mtime_ns))


def _walk_remote(filesystem: Any, base: str) -> Iterator[str | _File]:
    for path, info in filesystem.find(base, detail=True, withdirs=True).items():
        relative = path[len(base) :].strip("/")
        if not relative:
            continue
        if info["type"] == "directory":
            yield relative
        else:
            stamp = next((str(info[key]) for key in _STAMPS if info.get(key)), "")
            yield _File(relative, int(info["size"] or 0), stamp)


def _unreadable(root: str, path: str) -> InputError:
    return InputError(
        f"data.root={root}: {path} cannot be read by this user; all samples must be readable; "
        "change its permissions or remove it"
    )
