"""Photographs as they are stored: at one scale, in their own shapes, as pixels or encoded again."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import simplejpeg

from paceline.conf.data import Data
from paceline.tasks.data.decode.pixels import Hook, map_items, picture_of
from paceline.tasks.data.decode.transform import DecodeError, UInt8s
from paceline.tasks.data.listing import Origin
from paceline.tasks.data.prepare.moments import PixelSums, sum_pixels
from paceline.tasks.data.samples import Extent, Item, Samples

# Shape suffixes: N samples that could be read, H height, W width, C channels, 3 for first byte, height and width.

COLOUR_SPACES = {1: "GRAY", 3: "RGB"}  # of simplejpeg, by the number of channels


class Form(NamedTuple):
    """Form of stored images that are not squares of pixels."""

    side: int  # length of the shorter side, pixels
    extent: Extent
    quality: int | None  # of JPEG; None for pixels


class Photographs(NamedTuple):
    """Samples that were read, end to end."""

    content: UInt8s
    shapes_N3: npt.NDArray[np.int64]
    sums_3C: PixelSums  # before they were encoded
    positions: list[int]  # as in `Pixels`, and so are the reasons
    reasons: dict[int, str]


def form_of(data: Data) -> Form | None:
    """The form of a set's images; None for squares of pixels."""
    if data.storage != "jpeg" and not data.keeps_aspect:
        return None
    quality = data.jpeg_quality if data.storage == "jpeg" else None
    return Form(data.stored_side, "side" if data.keeps_aspect else data.fit, quality)


def read_photographs(
    origin: Origin, samples: Samples, form: Form, channels: int, between: Hook, num_threads: int
) -> Photographs:
    """Read samples and bring them to a form; errors as in `read_pixels`."""

    def store(item: Item) -> tuple[bytes, tuple[int, ...], PixelSums]:
        pixels_HWC = picture_of(item, form.side, form.extent)
        return encode(pixels_HWC, form.quality), pixels_HWC.shape[:2], sum_pixels(pixels_HWC)

    pieces: list[bytes] = []
    shapes: list[tuple[int, ...]] = []
    num_bytes, sums_3C = 0, np.zeros((3, channels), dtype=np.int64)
    positions: list[int] = []
    reasons: dict[int, str] = {}
    results = map_items(origin, samples, form.side, store, between, num_threads)
    for position, (_, result) in enumerate(results):
        if isinstance(result, DecodeError):
            reasons[position] = str(result)
            continue
        piece, shape, its_sums_3C = result
        pieces.append(piece)
        shapes.append((num_bytes, *shape))
        num_bytes += len(piece)
        sums_3C = sums_3C + its_sums_3C
        positions.append(position)
    content = np.frombuffer(b"".join(pieces), dtype=np.uint8)
    return Photographs(content, np.array(shapes, dtype=np.int64).reshape(-1, 3), sums_3C, positions, reasons)


def encode(pixels_HWC: UInt8s, quality: int | None) -> bytes:
    """An image as JPEG, or its pixels."""
    if quality is None:
        return pixels_HWC.tobytes()
    colours = COLOUR_SPACES[pixels_HWC.shape[2]]
    sampling = "Gray" if colours == "GRAY" else "420"
    encoded: bytes = simplejpeg.encode_jpeg(np.ascontiguousarray(pixels_HWC), quality, colours, sampling)
    return encoded
