"""The pixels of samples, as a worker reads them for a shard or a prediction: what can be read, and why the rest cannot.

Knows nothing of splits, shards or models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tasks.data import source, transform
from tasks.data.item import Item, Picture
from tasks.data.listing import Origin
from tasks.data.samples import Samples
from tasks.errors import one_line

# Shape suffixes: N samples that could be read, H height, W width, C channels, T targets.


class Pixels(NamedTuple):
    """Samples that have been read."""

    images_NHWC: npt.NDArray[np.uint8]
    targets_NT: npt.NDArray[np.float32] | None
    kept: list[int]
    """Positions of the images among the samples asked for."""
    reasons: dict[int, str]
    """Positions of the samples that cannot be read, and why, on one line."""


def read_pixels(
    origin: Origin, samples: Samples, image_size: int, channels: int, between: Callable[[], None] = lambda: None
) -> Pixels:
    """Read and scale samples.

    Args:
        origin: Where they lie.
        samples: Which.
        image_size: Height and width of the result, pixels.
        channels: Of the images, their mask included; files of images give 3.
        between: Called before each is decoded; what it raises ends the reading.

    Raises:
        InputError: The source cannot be opened from here.
        RunError: The user's source fails, or yields something else.
    """
    images_NHWC = np.empty((len(samples), image_size, image_size, channels), dtype=np.uint8)
    targets: list[npt.NDArray[np.float32]] = []
    kept: list[int] = []
    reasons: dict[int, str] = {}
    for position, item in enumerate(source.read_items(origin, samples, image_size)):
        between()
        try:
            _place(item, images_NHWC[len(kept)], image_size)
        except transform.DecodeError as error:
            reasons[position] = str(error)
        else:
            kept.append(position)
            if item.targets_T is not None:
                targets.append(item.targets_T)
    return Pixels(images_NHWC[: len(kept)], np.stack(targets) if targets else None, kept, reasons)


def _place(item: Item, image_HWC: npt.NDArray[np.uint8], image_size: int) -> None:
    """Put a sample where it belongs; its mask into the last channel, if it has one."""
    picture = _found(item.picture)
    colours_HWC = image_HWC if item.mask is None else image_HWC[..., :-1]
    if isinstance(picture, bytes):
        colours_HWC[:] = transform.decode(picture, image_size)
    else:
        colours_HWC[:] = transform.resize(picture, image_size)
    if item.mask is None:
        return
    mask = _found(item.mask)
    if not isinstance(mask, bytes):
        image_HWC[..., -1] = transform.resize_mask(mask, image_size)
    elif isinstance(picture, bytes):
        image_HWC[..., -1] = transform.decode_mask(mask, picture, image_size)
    else:
        raise transform.DecodeError("its mask is a file, and the image pixels; give both in one form")


def _found(content: Picture | Exception) -> Picture:
    if isinstance(content, transform.DecodeError):
        raise content
    if isinstance(content, OSError):
        raise transform.DecodeError(content.strerror or "file not found")
    if isinstance(content, Exception):
        raise transform.DecodeError(one_line(content))
    return content
