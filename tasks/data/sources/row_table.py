"""The table of images and labels that a file of arrays holds."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.tasks.data.decode.transform import MAX_PIXELS
from paceline.tasks.errors import InputError

NPZ, PARQUET, ZARR = ".npz", ".parquet", ".zarr"
IMAGES, LABELS, CLASS_NAMES = "images", "labels", "class_names"
BLOCK_BYTES = 2**20
MAX_LABEL_BYTES = 2**30
COLOURS = 3
Row = bytes | npt.NDArray[np.uint8]
"""An encoded image, or its pixels (H, W, C)."""


class Table(NamedTuple):
    """The content of a file without its pixels."""

    labels: npt.NDArray[Any]
    """Whole numbers, or words."""
    channels: int
    class_names: tuple[str, ...]
    """Names of the labels from 0; empty where the file lacks them."""


def channels_of(shape: tuple[int, ...], dtype: np.dtype[Any], *, is_fortran: bool = False) -> int:
    """Number of channels of the images of an array.

    Raises:
        InputError: the array does not hold images.
    """
    (channels,) = shape[3:4] or (1,)
    if len(shape) not in (3, 4) or channels not in (1, COLOURS) or 0 in shape or is_fortran:
        order = " in Fortran's order" if is_fortran else ""
        raise InputError(
            f"{IMAGES} has the shape {shape}{order}; give (images, height, width) or (images, height, width, 1 or 3)"
        )
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
