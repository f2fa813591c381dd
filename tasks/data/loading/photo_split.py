"""One split of photographs, which are decoded and cropped when they are gathered."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt
import simplejpeg
import torch

from paceline.tasks.data.decode.byte_scaling import scale_bytes
from paceline.tasks.data.prepare.photographs import COLOUR_SPACES
from paceline.tasks.data.split import Split
from paceline.tasks.errors import RunError, one_line

# Shape suffixes: N samples, H height, W width, C channels, 3 first byte, height and width, 4 top, left, height, width.

Box = Sequence[int]  # top, left, height and width, pixels
DCT_SCALES = (8, 4, 2)  # fractions that libjpeg decodes at almost no cost


@dataclass(frozen=True, eq=False)
class PhotoSplit(Split):
    """One split; `images` has for each shard its encoded images, or their pixels, end to end.

    A gathered image is a box of the stored one, scaled to `image_shape`: without a box, the largest square in its
    middle.
    """

    shapes: list[npt.NDArray[np.int64]]  # (N, 3) for each shard
    storage: Literal["raw", "jpeg"]
    stored_size: int | None

    def __post_init__(self) -> None:
        for content, shapes_N3 in zip(self._arrays, self.shapes, strict=True):
            ends_N = np.append(shapes_N3[1:, 0], content.size)
            sizes_N = shapes_N3[:, 1] * shapes_N3[:, 2] * self.image_shape[2]
            side = self.stored_size or self.image_shape[0]
            fits = (ends_N - shapes_N3[:, 0] == sizes_N) if self.storage == "raw" else ends_N > shapes_N3[:, 0]
            if shapes_N3[0, 0] or not (fits & (shapes_N3[:, 1:].min(axis=1) == side)).all():
                raise RunError(
                    f"prepared set, {self.name}: {content.size} bytes of images do not have the shapes that are "
                    "recorded; remove the set and run again to prepare it"
                )

    @property
    def keeps_aspect(self) -> bool:
        """Whether images have their own shapes."""
        return self.stored_size is not None

    @cached_property
    def _starts(self) -> npt.NDArray[np.int64]:
        return np.cumsum([0, *map(len, self.shapes)], dtype=np.int64)

    @cached_property
    def sizes_N2(self) -> npt.NDArray[np.int64]:
        """Height and width of the stored images."""
        return np.concatenate([np.empty((0, 2), np.int64), *(shapes_N3[:, 1:] for shapes_N3 in self.shapes)])

    def image(self, index: int, box: Box | None = None) -> npt.NDArray[np.uint8]:
        """One image (H, W, C)."""
        return self._read(int(self.shards_of(np.array(index))), index, box)

    def gather(
        self,
        indices: npt.NDArray[np.int64],
        out: npt.NDArray[np.uint8] | None = None,
        boxes_N4: npt.NDArray[np.int64] | None = None,
    ) -> npt.NDArray[np.uint8]:
        """Decode samples (n, H, W, C) on as many threads as torch uses; IndexError for an index outside."""
        if out is None:
            out = np.empty((len(indices), *self.image_shape), dtype=np.uint8)
        if len(indices) and (indices.min() < 0 or indices.max() >= self.num_samples):
            raise IndexError(f"indices from {indices.min()} to {indices.max()} in a split of {self.num_samples}")
        boxes = [None] * len(indices) if boxes_N4 is None else boxes_N4.tolist()
        work = list(zip(out, self.shards_of(indices).tolist(), indices.tolist(), boxes, strict=True))
        num_threads = min(torch.get_num_threads(), len(work))

        def fill(first: int) -> None:
            for image_HWC, shard, index, box in work[first::num_threads]:
                image_HWC[:] = self._read(shard, index, box)

        if num_threads > 1:
            list(_pool().map(fill, range(num_threads)))
        elif work:
            fill(0)
        return out

    def gather_by_shard(self, indices: npt.NDArray[np.int64], out: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
        """Decode samples (n, H, W, C) to `out`; returns their places in `indices` (n,)."""
        self.gather(indices, out)
        return np.arange(len(indices))

    def _read(self, shard: int, index: int, box: Box | None) -> npt.NDArray[np.uint8]:
        number = index - int(self._starts[shard])
        _, height, width = self.shapes[shard][number].tolist()
        if box is None:
            side = min(height, width)
            box = (height - side) // 2, (width - side) // 2, side, side
        pixels_HWC, factor = self._decode(shard, number, min(box[2:]))
        if factor > 1:
            row, column = (start // factor for start in box[:2])
            tall, wide = (max(1, length // factor) for length in box[2:])
        else:
            row, column, tall, wide = box
        return scale_bytes(pixels_HWC[row : row + tall, column : column + wide], self.image_shape[:2], "bilinear")

    def _decode(self, shard: int, number: int, shortest: int = 0) -> tuple[npt.NDArray[np.uint8], int]:
        """The stored image, at the fraction of its size where twice the size of the result remains of `shortest`."""
        _, height, width = self.shapes[shard][number].tolist()
        content = self._arrays[shard][self._first_byte(shard, number) : self._first_byte(shard, number + 1)]
        channels = self.image_shape[2]
        if self.storage == "raw":
            return content.reshape(height, width, channels), 1
        factor = next((factor for factor in DCT_SCALES if shortest >= 2 * factor * self.image_shape[0]), 1)
        rows, columns = -(-height // factor), -(-width // factor)
        try:
            pixels_HWC: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(
                content, COLOUR_SPACES[channels], min_height=rows, min_width=columns
            )
            decoded = f"{pixels_HWC.shape}"
        except ValueError as error:
            pixels_HWC, decoded = np.empty((0, 0, 0), np.uint8), one_line(error)
        if pixels_HWC.shape != (rows, columns, channels):
            raise RunError(
                f"prepared set, {self.name}, shard {shard}: image {number} is not the JPEG of {height} x {width} "
                f"pixels that was stored ({decoded}); remove the set and run again to prepare it"
            )
        return pixels_HWC, factor

    @cached_property
    def in_memory(self) -> PhotoSplit:
        """The split with the pixels of all images in memory."""
        images, shapes = [], []
        for shard, shapes_N3 in enumerate(self.shapes):
            numbers = range(len(shapes_N3))
            pieces = list(_pool().map(lambda number, of=shard: self._decode(of, number)[0].ravel(), numbers))
            starts_N = np.cumsum([0, *map(len, pieces)])[:-1]
            images.append(np.concatenate(pieces))
            shapes.append(np.column_stack([starts_N, shapes_N3[:, 1:]]))
        return PhotoSplit(self.name, images, self.labels_N, None, self.image_shape, shapes, "raw", self.stored_size)

    def _first_byte(self, shard: int, number: int) -> int:
        shapes_N3 = self.shapes[shard]
        return int(shapes_N3[number, 0]) if number < len(shapes_N3) else self.images[shard].size


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="paceline-decode")
