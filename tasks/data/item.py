"""The record that every source yields for a sample."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

# Shape suffixes: H height, W width, C channels, T targets.

Picture = bytes | npt.NDArray[np.uint8]
"""The content of a file, or pixels (H, W, C), or (H, W) for one channel or a mask."""


Fit = Literal["scale", "crop"]
"""`scale`: scale the shorter side to the size and crop the middle. `crop`: crop the middle without scaling."""
Extent = Fit | Literal["whole"]
"""`whole`: the complete image at its own size."""


class Item(NamedTuple):
    """One sample."""

    picture: Picture | Exception
    """Image of any size; an exception where it cannot be read, which Paceline counts and lists."""
    mask: Picture | Exception | None = None
    """The class of each pixel, from 0; 255 for none."""
    targets_T: npt.NDArray[np.float32] | None = None
