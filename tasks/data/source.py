"""Chooses the source that a configuration names.

Lists in the caller's process and reads on the workers; what a source looks like inside is known only to its module.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np
import numpy.typing as npt

from conf.schema import SOURCES_WITHOUT_ROOT, Data
from tasks.data.classes import keep_classes
from tasks.data.listing import Origin, SampleListing, check_classes
from tasks.data.samples import Samples
from tasks.data.sources import cifar10, digits, folder, generated, pairs
from tasks.errors import InputError, SourceError, one_line

FETCH_AT_ONCE = 64
"""Files asked of a remote file system together; bounds memory and hides latency."""


def list_samples(data: Data) -> SampleListing:
    """Every sample that the source offers, by split.

    Raises:
        InputError: The source is missing, empty, or cannot be learned from; as `SourceError` if it cannot be reached.
    """
    if data.root is None and data.source not in SOURCES_WITHOUT_ROOT:
        raise InputError(f"data.root is not set; source {data.source} needs one; add data.root=DIR")
    listings = {
        "digits": digits.list_digits,
        "rotated_digits": digits.list_rotated_digits,
        "folder": folder.list_samples,
        "cifar10": cifar10.list_samples,
        "pairs": pairs.list_samples,
        "shapes": generated.list_shapes,
        "textures": generated.list_textures,
    }
    try:
        listing = listings[data.source](data)
    except InputError:
        raise
    except Exception as error:  # each remote file system raises its own: no credentials, no route, forbidden
        reason = one_line(error)
        raise SourceError(
            f"data.root={data.root}: cannot be listed ({reason}); mend the address or the access"
        ) from error
    if data.classes is not None:
        listing = keep_classes(listing, data.classes)
    if not listing.num_planes:
        check_classes(listing.train, listing.class_names, f"data.source={data.source}")
    return listing


def read_arrays(
    origin: Origin, samples: Samples, image_size: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32] | None]:
    """Images (N, H, W, C) of a source that is made of arrays, and its targets (N, T) if it has any.

    Raises:
        InputError: The arrays are damaged.
    """
    if origin.kind == "digits":
        return digits.read_digits(samples, image_size), None
    if origin.kind == "rotated_digits":
        return digits.read_rotated_digits(samples, image_size)
    if origin.kind == "shapes":
        return generated.read_shapes(samples, image_size), None
    if origin.kind == "textures":
        return generated.read_textures(samples, image_size), None
    return cifar10.read_samples(origin.root, samples), None


def read_files(origin: Origin, samples: Samples) -> Iterator[bytes | OSError]:
    """The content of each file, or the error that reading it gave.

    Raises:
        InputError: The root cannot be opened from this process.
    """
    return _read_paths(origin.root, samples.paths)


def read_masks(origin: Origin, samples: Samples) -> Iterator[bytes | OSError]:
    """The same of the masks of `pairs`."""
    return _read_paths(origin.root, (pairs.mask_path(path, origin.mask_suffix) for path in samples.paths))


def _read_paths(root: str, relative: Iterable[str]) -> Iterator[bytes | OSError]:
    filesystem, base = folder.open_root(root)
    if folder.is_local(filesystem):
        for path in relative:
            yield _read_local(f"{base}/{path}")
        return
    rest = iter(relative)
    while paths := [f"{base.rstrip('/')}/{path}" for path in islice(rest, FETCH_AT_ONCE)]:
        contents = filesystem.cat(paths, on_error="return")
        for path in paths:
            content = contents.get(path, FileNotFoundError(path))
            # A file that is gone is a fact about the data; any other error is the network's, and worth a retry.
            if isinstance(content, Exception) and not isinstance(content, FileNotFoundError):
                raise content
            yield content


def _read_local(path: str) -> bytes | OSError:
    try:
        # Half the time of Path.read_bytes, and a small picture is decoded in less than either.
        with open(path, "rb", buffering=0) as stream:  # noqa: PTH123
            return stream.read()
    except OSError as error:
        return error
