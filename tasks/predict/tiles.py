"""Cut images of any size into tiles that a network can take, and join its outputs.

A tile has a margin as wide as the receptive field, so that the output for a pixel does not depend on the tile, but for
rounding. Beyond its borders an image continues as its mirror image. Shapes: M tiles, H height, W width, C channels.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

SIDE = 256  # of a tile of a larger image, pixels, where the margins leave half of it
MAX_SIDE = 2048  # of a tile, pixels: what a network of 32 features at full size still fits into memory with
STEP = 32  # tiles of smaller images have sides that are multiples of it: torch tunes a network again for each new size


class Grid(NamedTuple):
    """Sizes of tiles and margins for a network, pixels."""

    side: int  # largest height and width of a tile with its margins
    margin: int
    step: int  # sides of tiles are multiples of it, as is the margin, so that all tiles are halved where the image is


class Band(NamedTuple):
    """A row of tiles."""

    tiles_MHWC: npt.NDArray[np.uint8]
    top: int  # of what is wanted of it, in the image
    width: int  # of what is wanted of a tile


def grid_for(reach: int, stride: int) -> Grid:
    """The grid for a receptive field (`reach`) and a number that divides height and width (`stride`), in pixels."""
    step = int(np.lcm(stride, STEP))
    margin = _multiple(reach, step)
    return Grid(max(_multiple(SIDE, step), 4 * margin), margin, step)


def bands_of(image_HWC: npt.NDArray[np.uint8], grid: Grid) -> Iterator[Band]:
    """The rows of tiles of an image, from top to bottom."""
    height, width = (min(grid.side - 2 * grid.margin, _multiple(pixels, grid.step)) for pixels in image_HWC.shape[:2])
    columns = [_mirror_indices(start, width, image_HWC.shape[1], grid) for start in range(0, image_HWC.shape[1], width)]
    for top in range(0, image_HWC.shape[0], height):
        rows = _mirror_indices(top, height, image_HWC.shape[0], grid)
        yield Band(np.stack([image_HWC[np.ix_(rows, column)] for column in columns]), top, width)


def put(band: Band, tiles_MHW: npt.NDArray[Any], whole_HW: npt.NDArray[Any], grid: Grid) -> None:
    """Copy the outputs of a row of tiles into the output of the image; both may have channels."""
    inner = slice(grid.margin, -grid.margin or None)
    for number, tile_HW in enumerate(tiles_MHW):
        place = whole_HW[band.top :, number * band.width :]
        tile = tile_HW[inner, inner][: place.shape[0], : place.shape[1]]
        place[: tile.shape[0], : tile.shape[1]] = tile


def _mirror_indices(start: int, size: int, pixels: int, grid: Grid) -> npt.NDArray[np.int64]:
    places = np.arange(start - grid.margin, start + size + grid.margin) % (2 * pixels)
    return np.minimum(places, 2 * pixels - 1 - places)


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of
