"""What a source yields of one sample, whoever wrote the source. Knows nothing of where it lies and where it goes."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

# Shape suffixes: H height, W width, C channels, T targets.

Picture = bytes | npt.NDArray[np.uint8]
"""The content of a file, or pixels (H, W, C), or (H, W) for one channel or a mask."""


Fit = Literal["scale", "crop"]
"""How a picture comes to its size. `scale`: its shorter side is scaled to it, and the middle taken; `crop`: the middle
is taken as it is."""
Extent = Fit | Literal["whole"]
"""What is taken of a picture: that, or all of it, of whatever size."""


class Item(NamedTuple):
    """One sample."""

    picture: Picture | Exception
    """Of any size; an exception where it cannot be read, which is counted and listed."""
    mask: Picture | Exception | None = None
    """The class of each pixel, from 0; 255 for none."""
    targets_T: npt.NDArray[np.float32] | None = None
