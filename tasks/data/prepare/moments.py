"""Mean and variance of channels, computed in parts and merged without loss.

Parts are exact (integer sums); the merge is that of Chan, Golub and LeVeque, "Updating formulae and a pairwise
algorithm for computing sample variances" (Stanford STAN-CS-79-773, 1979), equations 2.1.
"""

import functools
import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from paceline.tasks.records.record import Record

_IMAGES_AT_ONCE = 256
_ROWS_AT_ONCE = 2**16  # sums of so many squares of bytes are below 2**32
_VALUES_AT_ONCE = 2**16  # as 32 bits they stay in a core's cache
FULL_SCALE = 255.0

PixelSums = npt.NDArray[np.int64]
"""Of each channel (3, C): the number of pixels, their sum, and the sum of their squares.

Integers, so that the result does not depend on how they were added."""


class Moments(Record):
    """Count, mean and sum of squared deviations per channel, in units of uint8 steps."""

    count: int  # pixels behind each channel's mean
    mean: tuple[float, ...]
    sum_of_squares: tuple[float, ...]  # sum of the squared deviations from the mean (M2)

    def scaled_mean(self) -> tuple[float, ...]:
        """Per-channel mean in units of full scale."""
        return tuple(mean / FULL_SCALE for mean in self.mean)

    def scaled_std(self) -> tuple[float, ...]:
        """Per-channel standard deviation (of the population) in units of full scale."""
        return tuple(math.sqrt(squares / self.count) / FULL_SCALE for squares in self.sum_of_squares)


def of_sums(sums_3C: PixelSums) -> Moments:
    """Moments of the pixels behind sums."""
    (num_pixels, *_), totals, squares = sums_3C.tolist()
    count = max(1, num_pixels)
    deviations = ((count * square - total * total) / count for total, square in zip(totals, squares, strict=True))
    return Moments(count=num_pixels, mean=tuple(total / count for total in totals), sum_of_squares=tuple(deviations))


def sum_pixels(images_NHWC: npt.NDArray[np.uint8]) -> PixelSums:
    """Sums over the pixels of images (N, H, W, C), or of one, with at most `_ROWS_AT_ONCE` rows together."""
    channels = images_NHWC.shape[-1]
    # Row by row: a reduction whose inner axis is 3 long runs at a tenth of the speed. 32 bits hold the sums.
    rows = images_NHWC.reshape(-1, images_NHWC.shape[-2] * channels)
    sums, squares = np.zeros((2, rows.shape[1]), dtype=np.uint32)
    step = max(1, _VALUES_AT_ONCE // rows.shape[1])
    for first in range(0, len(rows), step):
        part = rows[first : first + step].astype(np.uint32)
        sums += part.sum(axis=0, dtype=np.uint32)
        squares += np.multiply(part, part, out=part).sum(axis=0, dtype=np.uint32)
    sums_C, squares_C = (row.reshape(-1, channels).sum(axis=0, dtype=np.int64) for row in (sums, squares))
    return np.stack([np.full(channels, images_NHWC.size // channels), sums_C, squares_C])


def of_images(images_NHWC: npt.NDArray[np.uint8]) -> Moments:
    """Moments of one shard."""
    step = max(1, min(_IMAGES_AT_ONCE, _ROWS_AT_ONCE // images_NHWC.shape[1]))
    parts = (images_NHWC[start : start + step] for start in range(0, len(images_NHWC), step))
    return of_sums(sum(map(sum_pixels, parts), np.zeros((3, images_NHWC.shape[3]), dtype=np.int64)))


def merge(parts: Iterable[Moments]) -> Moments:
    """Merge the moments of disjoint parts, in the given order for equal bits; ValueError if no part has a pixel."""
    filled = [part for part in parts if part.count]
    if not filled:
        raise ValueError("no pixel to take moments of")
    return functools.reduce(_merge_two, filled)


def over_frames(clips: Moments, num_frames: int) -> Moments:
    """Give all frames of clips the moments of their colours: the statistics do not depend on the place in a clip."""
    num_colours = len(clips.mean) // num_frames
    frames = (
        Moments(count=clips.count, mean=clips.mean[place], sum_of_squares=clips.sum_of_squares[place])
        for place in (slice(first, first + num_colours) for first in range(0, len(clips.mean), num_colours))
    )
    merged = merge(frames)
    return Moments(count=merged.count, mean=merged.mean * num_frames, sum_of_squares=merged.sum_of_squares * num_frames)


def _merge_two(a: Moments, b: Moments) -> Moments:
    count = a.count + b.count
    deltas = [mean_b - mean_a for mean_a, mean_b in zip(a.mean, b.mean, strict=True)]
    mean = (mean_a + delta * (b.count / count) for mean_a, delta in zip(a.mean, deltas, strict=True))
    squares = (
        squares_a + squares_b + delta * delta * (a.count * (b.count / count))
        for squares_a, squares_b, delta in zip(a.sum_of_squares, b.sum_of_squares, deltas, strict=True)
    )
    return Moments(count=count, mean=tuple(mean), sum_of_squares=tuple(squares))
