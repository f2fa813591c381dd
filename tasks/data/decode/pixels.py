"""The pixels of samples, as a worker reads them for a shard or a prediction, and why some cannot be read."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from paceline.tasks.data.decode import transform
from paceline.tasks.data.decode.map_ahead import map_ahead
from paceline.tasks.data.decode.transform import DecodeError, UInt8s, UnreadError
from paceline.tasks.data.listing import Origin
from paceline.tasks.data.samples import Extent, Item, Picture, Samples
from paceline.tasks.data.sources import registry as source
from paceline.tasks.errors import one_line

# Shape suffixes: N samples that could be read, H height, W width, C channels, T targets.

T = TypeVar("T")
Picked = tuple[UInt8s, UInt8s | None]  # a picture (H, W, C), and its mask (H, W) if it has one
Hook = Callable[[], None]  # called between the samples
_AHEAD = 4  # samples for each thread that decodes, which are in memory


class Pixels(NamedTuple):
    """Samples that were read."""

    images_NHWC: UInt8s
    targets_NT: npt.NDArray[np.float32] | None
    positions: list[int]  # positions of the images among the requested samples
    reasons: dict[int, str]  # positions of the samples that cannot be read, and why, on one line
    num_unread: int = 0  # number of these whose bytes this host could not read


def read_pixels(
    origin: Origin, samples: Samples, image_size: int, channels: int, between: Hook = lambda: None, num_threads: int = 1
) -> Pixels:
    """Read samples at `image_size`; InputError if the source cannot be opened from here, RunError if it fails."""
    images_NHWC = np.empty((len(samples), image_size, image_size, channels), dtype=np.uint8)
    targets: list[npt.NDArray[np.float32]] = []
    positions, reasons, num_unread = list[int](), dict[int, str](), 0
    work = partial(_pixels_of, image_size=image_size, fit=origin.fit)
    results = map_items(origin, samples, image_size, work, between, num_threads)
    for position, (item, pixels) in enumerate(results):
        if isinstance(pixels, DecodeError):
            reasons[position] = str(pixels)
            num_unread += isinstance(pixels, UnreadError)
            continue
        image_HWC = images_NHWC[len(positions)]
        colours_HWC, mask_HW = pixels
        if mask_HW is None:
            image_HWC[:] = colours_HWC
        else:
            image_HWC[..., :-1], image_HWC[..., -1] = colours_HWC, mask_HW
        positions.append(position)
        if item.targets_T is not None:
            targets.append(item.targets_T)
    return Pixels(images_NHWC[: len(positions)], np.stack(targets) if targets else None, positions, reasons, num_unread)


def map_items(
    origin: Origin, samples: Samples, image_size: int, work: Callable[[Item], T], between: Hook, num_threads: int
) -> Iterator[tuple[Item, T | DecodeError]]:
    """Read samples, and do `work` on them in threads: item, and the result or why there is none, in order.

    Decoders work outside of Python's lock. Errors are as in `read_pixels`.
    """

    def attempt(item: Item) -> T | DecodeError:
        try:
            return work(item)
        except DecodeError as error:
            return error
        except MemoryError as error:
            return DecodeError(one_line(error))

    def items() -> Iterator[Item]:
        for item in source.spec_of(origin).read(origin, samples, image_size):
            between()
            yield item

    if num_threads == 1 or source.spec_of(origin).has_rows:  # a row takes less time than handing it to a thread
        yield from ((item, attempt(item)) for item in items())
        return
    with ThreadPoolExecutor(num_threads, thread_name_prefix="paceline-decode") as pool:
        yield from map_ahead(pool, attempt, items(), _AHEAD * num_threads)


def read_whole(origin: Origin, samples: Samples, image_size: int) -> Iterator[Picked | DecodeError]:
    """Pixels and masks of samples at their own sizes (drawn: `image_size`), or why not; errors as in `read_pixels`."""
    work = partial(_pixels_of, image_size=image_size, fit="whole")
    return (pixels for _, pixels in map_items(origin, samples, image_size, work, lambda: None, 1))


def picture_of(item: Item, image_size: int, fit: Extent) -> UInt8s:
    """A sample's picture (H, W, C)."""
    picture = _content(item.picture)
    if isinstance(picture, bytes):
        return transform.decode(picture, image_size, fit)
    return transform.resize(picture, image_size, fit)


def _pixels_of(item: Item, image_size: int, fit: Extent) -> Picked:
    colours_HWC, picture = picture_of(item, image_size, fit), item.picture
    if item.mask is None:
        return colours_HWC, None
    mask = _content(item.mask)
    if not isinstance(mask, bytes):
        return colours_HWC, transform.resize_mask(mask, image_size, fit)
    if isinstance(picture, bytes):
        return colours_HWC, transform.decode_mask(mask, picture, image_size, fit)
    raise DecodeError("its mask is a file, and the image pixels; give both in one form")


def _content(content: Picture | Exception) -> Picture:
    if isinstance(content, DecodeError):
        raise content
    if isinstance(content, OSError):
        raise UnreadError(content.strerror or "file not found")
    if isinstance(content, Exception):
        raise DecodeError(one_line(content))
    return content
