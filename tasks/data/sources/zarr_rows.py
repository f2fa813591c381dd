"""Rows of a Zarr group of images (format 2 or 3, sharded or not): the chunks that hold them are decoded, one at a time.

The group has the arrays `images` and `labels`, and `class_names` as an attribute, or as one of the group around it.
numcodecs, from the required release on, refuses codecs that run code from the data (pickle).
"""

import warnings
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import zarr
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from zarr.storage import FsspecStore

from paceline.tasks.data.decode.transform import DecodeError
from paceline.tasks.data.sources import array_rows, folder
from paceline.tasks.data.sources.array_rows import CLASS_NAMES, IMAGES, LABELS, ZARR, Row, Table
from paceline.tasks.data.storage import s3
from paceline.tasks.errors import InputError, one_line

MAX_CHUNK_BYTES = 2**28  # limit of a chunk, which is decoded completely, and of the rows that are read at a time


def groups(root: str, path: str) -> list[str]:
    """Paths of the groups below a store that hold images: the store itself (empty), or those named after splits."""
    group = _group(root, path)
    if IMAGES in group:
        return [""]
    split_names = [name for name, inner in sorted(group.groups()) if name in folder.SPLIT_FOLDERS and IMAGES in inner]
    if not split_names:
        names = ", ".join(sorted(group.keys())) or "nothing"
        raise InputError(f"holds {names}; it needs the arrays {IMAGES} and {LABELS}, or groups train, test with them")
    return split_names


def table(root: str, path: str) -> Table:
    """The table without its pixels."""
    group = _group(root, path)
    images = _array(group, IMAGES)
    with warnings.catch_warnings():  # not where rows are read: it holds for all threads of a process
        warnings.simplefilter("ignore")  # of fixed-length words, which other libraries than this one may not read
        labels = _array(group, LABELS)
    channels = array_rows.channels_of(images.shape, images.dtype)
    chunk_bytes = int(np.prod(images.chunks)) * images.dtype.itemsize
    if chunk_bytes > MAX_CHUNK_BYTES:
        raise InputError(
            f"{IMAGES} has chunks {images.chunks} of {chunk_bytes} bytes, each decoded as a whole; up to "
            f"{MAX_CHUNK_BYTES} are understood; write it with fewer images a chunk"
        )
    if labels.shape != images.shape[:1]:
        raise InputError(f"has {images.shape[0]} images and labels {labels.shape}; give one label for each image")
    if labels.nbytes > array_rows.MAX_LABEL_BYTES:
        raise InputError(f"{LABELS} has {labels.nbytes} bytes; up to {array_rows.MAX_LABEL_BYTES} are understood")
    outer = path.rpartition("/")[0]
    names: Any = group.attrs.get(CLASS_NAMES) or ()
    if not names and outer.lower().endswith(ZARR):  # of the store that the group lies in
        names = _group(root, outer).attrs.get(CLASS_NAMES, ())
    if not isinstance(names, (list, tuple)):
        raise InputError(f"{CLASS_NAMES} is {names!r}; give a list of words")
    values = np.asarray(labels[:])
    if values.dtype.kind == "T":  # words of any length
        values = np.array(values.tolist(), dtype=np.str_)
    return Table(values, channels, tuple(map(str, names)))


def rows(root: str, path: str, chosen: Sequence[int]) -> Iterator[Row | DecodeError]:
    """Images of rows, in their order."""
    images = _array(_group(root, path), IMAGES)
    channels = array_rows.channels_of(images.shape, images.dtype)
    per_chunk = images.chunks[0]
    # Whatever part of an image a chunk holds, all of the image is read.
    row_bytes = int(np.prod(images.shape[1:])) * images.dtype.itemsize
    at_once = max(1, MAX_CHUNK_BYTES // row_bytes)
    for _, members in groupby(chosen, key=lambda row: (row // per_chunk, row % per_chunk // at_once)):
        inside = list(members)
        first = inside[0]
        try:
            block = np.asarray(images[first : inside[-1] + 1])
        except OSError:
            raise
        except Exception as error:  # each codec raises its own
            if s3.is_of_store(error):
                raise OSError(one_line(error)) from error
            raise InputError(f"{IMAGES} from {first} on: {one_line(error)}") from error
        if len(block) != inside[-1] + 1 - first:
            raise InputError(f"{IMAGES} ends before its image {inside[-1]}")
        for row in inside:
            image = block[row - first]
            if (image == images.fill_value).all():  # as which Zarr reads missing chunks
                yield DecodeError(f"every pixel is the fill value {images.fill_value}, as where nothing was written")
            else:
                yield array_rows.in_eight_bits(image.reshape(*image.shape[:2], channels))


def _group(root: str, place: str) -> zarr.Group:
    filesystem, path = folder.open_root(f"{root.rstrip('/')}/{place}")
    store: str | FsspecStore = path
    if not folder.is_local(filesystem):  # the one that is open already, with its settings and connections
        store = FsspecStore(AsyncFileSystemWrapper(filesystem, asynchronous=True), read_only=True, path=path)
    try:
        return zarr.open_group(store, mode="r", use_consolidated=False)
    except FileNotFoundError as error:
        raise InputError("is not a Zarr group; write one, of format 2 or 3") from error


def _array(group: zarr.Group, name: str) -> zarr.Array[Any]:
    array = group.get(name)
    if not isinstance(array, zarr.Array):
        held = ", ".join(sorted(group.keys())) or "nothing"
        raise InputError(f"holds {held}; it needs the arrays {IMAGES} and {LABELS}")
    return array
