"""The pixels of samples, as a worker reads them for a shard or a prediction: what can be read, and why the rest cannot.

Knows nothing of splits, shards or models.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tasks.data import source, transform
from tasks.data.listing import Origin
from tasks.data.samples import Samples
from tasks.data.sources import array_rows, signals

# Shape suffixes: N samples that could be read, H height, W width, C channels, T targets.


Content = array_rows.Row | transform.DecodeError | OSError
"""Of a file or a row, or why there is none."""


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
        between: Called before each file; what it raises ends the reading.

    Raises:
        InputError: The source cannot be opened from here.
    """
    if origin.kind in ("files", "pairs", "signals", "arrays"):
        return _of_files(origin, samples, image_size, channels, between)
    images_NHWC, targets_NT = source.read_arrays(origin, samples, image_size)
    images_NHWC = np.ascontiguousarray(transform.resize_arrays(images_NHWC, image_size))
    return Pixels(images_NHWC, targets_NT, list(range(len(samples))), {})


def _of_files(origin: Origin, samples: Samples, image_size: int, channels: int, between: Callable[[], None]) -> Pixels:
    images_NHWC = np.empty((len(samples), image_size, image_size, channels), dtype=np.uint8)
    kept: list[int] = []
    reasons: dict[int, str] = {}
    masks = source.read_masks(origin, samples) if origin.kind == "pairs" else repeat(None)
    colours = channels - (origin.kind == "pairs")
    for position, (content, mask) in enumerate(zip(source.read_files(origin, samples), masks, strict=False)):
        between()
        try:
            images_NHWC[len(kept), ..., :colours] = _decode(origin, content, image_size)
            if mask is not None:
                images_NHWC[len(kept), ..., colours] = transform.decode_mask(_found(mask), _found(content), image_size)
        except transform.DecodeError as error:
            reasons[position] = str(error)
        else:
            kept.append(position)
    return Pixels(images_NHWC[: len(kept)], None, kept, reasons)


def _decode(origin: Origin, content: Content, image_size: int) -> npt.NDArray[np.uint8]:
    if isinstance(content, np.ndarray):
        (image_HWC,) = transform.resize_arrays(content[np.newaxis], image_size)
        return np.asarray(image_HWC)
    if origin.signal is not None:
        return signals.decode(_found(content), origin.signal, image_size)
    return transform.decode(_found(content), image_size)


def _found(content: Content) -> bytes:
    if isinstance(content, transform.DecodeError):
        raise content
    if isinstance(content, OSError):
        raise transform.DecodeError(content.strerror or "file not found")
    assert isinstance(content, bytes), "masks are of files"
    return content
