"""Pixels for a device that predicts faster than one thread decodes: blocks of samples, read by several threads."""

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from contextvars import Context, copy_context

import numpy as np
import numpy.typing as npt

from paceline.tasks.data.decode.map_ahead import map_ahead
from paceline.tasks.data.decode.pixels import Pixels, read_pixels
from paceline.tasks.data.listing import Origin
from paceline.tasks.data.samples import Samples
from paceline.tasks.data.sources.registry import spec_of

# Shape suffixes: N samples, H height, W width, C channels.

BLOCK_BYTES = 2**20  # pixels of a block: a few photographs, so that the first ones are soon there
AHEAD = 2  # blocks for each thread that are read or wait for the device


def read_ahead(
    origin: Origin, samples: Samples, image_size: int, channels: int, num_threads: int
) -> Generator[tuple[int, Pixels]]:
    """Read samples in order; yields the place of a block's first sample, and its pixels. Errors as in `read_pixels`.

    With 0 threads all samples are one block, read by the caller's thread: on a CPU other threads would only take cores
    from the network. A table is one block too, because its rows are decoded from the beginning of a group.
    """
    if num_threads == 0:
        yield 0, read_pixels(origin, samples, image_size, channels)
        return
    num_block = len(samples) if spec_of(origin).has_rows else max(1, BLOCK_BYTES // (image_size**2 * channels))
    # The context holds the counter of remote reads, and is of one thread at a time.
    blocks = ((start, copy_context()) for start in range(0, len(samples), num_block))

    def read(block: tuple[int, Context]) -> Pixels:
        start, context = block
        return context.run(read_pixels, origin, samples[start : start + num_block], image_size, channels)

    with (
        ThreadPoolExecutor(num_threads, thread_name_prefix="paceline-decode") as pool,
        closing(map_ahead(pool, read, blocks, AHEAD * num_threads - 1)) as results,
    ):
        for (start, _), pixels in results:
            yield start, pixels


class PixelBatch:
    """Collects the images of blocks and cuts them into batches of one size, whatever was rejected between them."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._positions: list[int] = []
        self._images: list[npt.NDArray[np.uint8]] = []

    def add(self, first: int, pixels: Pixels) -> None:
        """Add the images of a block."""
        self._positions += [first + position for position in pixels.positions]
        self._images.append(pixels.images_NHWC)

    def take(self, *, rest: bool) -> Iterator[tuple[list[int], npt.NDArray[np.uint8]]]:
        """Yield the positions and images (N, H, W, C) of complete batches, and with `rest` those of the last one."""
        while len(self._positions) >= self._size or (rest and self._positions):
            if len(self._images) > 1:
                self._images = [np.concatenate(self._images)]
            (images_NHWC,) = self._images
            yield self._positions[: self._size], images_NHWC[: self._size]
            self._positions, self._images = self._positions[self._size :], [images_NHWC[self._size :]]
