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
        channels: Of the images, their mask included; files give 3.
        between: Called before each file; what it raises ends the reading.

    Raises:
        InputError: The source cannot be opened from here.
    """
    if origin.kind in ("files", "pairs"):
        return _of_files(origin, samples, image_size, channels, between)
    images_NHWC, targets_NT = source.read_arrays(origin, samples, image_size)
    images_NHWC = np.ascontiguousarray(transform.resize_arrays(images_NHWC, image_size))
    return Pixels(images_NHWC, targets_NT, list(range(len(samples))), {})


def _of_files(origin: Origin, samples: Samples, image_size: int, channels: int, between: Callable[[], None]) -> Pixels:
    images_NHWC = np.empty((len(samples), image_size, image_size, channels), dtype=np.uint8)
    kept: list[int] = []
    reasons: dict[int, str] = {}
    masks = source.read_masks(origin, samples) if origin.kind == "pairs" else repeat(None)
    for position, (content, mask) in enumerate(zip(source.read_files(origin, samples), masks, strict=False)):
        between()
        try:
            images_NHWC[len(kept), ..., :3] = _decode(content, image_size)
            if mask is not None:
                images_NHWC[len(kept), ..., 3] = transform.decode_mask(_found(mask), _found(content), image_size)
        except transform.DecodeError as error:
            reasons[position] = str(error)
        else:
            kept.append(position)
    return Pixels(images_NHWC[: len(kept)], None, kept, reasons)


def _decode(content: bytes | OSError, image_size: int) -> npt.NDArray[np.uint8]:
    return transform.decode(_found(content), image_size)


def _found(content: bytes | OSError) -> bytes:
    if isinstance(content, OSError):
        raise transform.DecodeError(content.strerror or "file not found")
    return content
