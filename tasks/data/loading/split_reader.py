"""Opens a split of a prepared set; photographs are decoded and cropped when they are gathered."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import simplejpeg
import torch

from paceline.tasks.data.decode.transform import scale_bytes
from paceline.tasks.data.listing import SplitName
from paceline.tasks.data.loading.batch import UInt8s
from paceline.tasks.data.loading.sampling import Int64s
from paceline.tasks.data.prepare import manifest
from paceline.tasks.data.prepare.photographs import COLOUR_SPACES
from paceline.tasks.data.prepare.shard import Shard
from paceline.tasks.data.split import Split
from paceline.tasks.errors import RunError, one_line
from paceline.tasks.records.data import PreparedSet

# Shape suffixes: N samples, H height, W width, C channels, 3 first byte, height and width, 4 top, left, height, width.

Box = Sequence[int]  # top, left, height and width, pixels
DCT_SCALES = (8, 4, 2)  # fractions that libjpeg decodes at almost no cost


def open_split(prepared: PreparedSet, split: SplitName) -> Split:
    """Open one split of a prepared set, after a check of its files; RunError if the set does not match its manifest."""
    path = Path(prepared.path)
    try:
        facts = manifest.read(path)
    except manifest.DamagedError as error:
        raise RunError(f"prepared set {path}: {error}; run again to prepare it again") from error

    def load(kind: str, dtype: type[np.generic], shape: tuple[int, ...] | None) -> list[Any]:
        return [_load(path, shard, kind, dtype, shape) for shard in facts.of_split(split)]

    num_targets = len(facts.target_names)
    no_targets = np.empty((0, num_targets), dtype=np.float32)
    try:
        labels_N = np.concatenate([np.empty(0, dtype=np.int64), *load("labels", np.int64, ())])
        if labels_N.size and not 0 <= labels_N.min() <= labels_N.max() < len(facts.class_names):
            raise manifest.DamagedError(f"a label of {split} is outside of its {len(facts.class_names)} classes")
        images = load("images", np.uint8, facts.image_shape if prepared.has_squares else None)
        targets = [no_targets, *load("targets", np.float32, (num_targets,))] if num_targets else []
        if prepared.has_squares:
            return Split(split, images, labels_N, np.concatenate(targets) if targets else None, facts.image_shape)
        shapes = load("shapes", np.int64, (3,))
        return PhotoSplit(split, images, labels_N, None, facts.image_shape, shapes, facts.storage, facts.stored_size)
    except manifest.DamagedError as error:
        raise RunError(f"prepared set {path}: {error}; remove the set and run again to prepare it") from error


def _load(
    path: Path, shard: Shard, kind: str, dtype: type[np.generic], shape: tuple[int, ...] | None
) -> npt.NDArray[Any]:
    """The array of a shard: a row of this shape for each sample, or any number of bytes."""
    file = shard.file(kind)
    if file is None:
        raise manifest.DamagedError(f"shard {shard.number} of {shard.split} has no {kind}")
    try:
        array: npt.NDArray[Any] = np.load(path / file.name, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise manifest.DamagedError(f"{file.name} is not an array of numbers ({one_line(error)[:200]})") from error
    expected = (array.size,) if shape is None else (shard.num_samples, *shape)
    if array.dtype != dtype or array.shape != expected:
        raise manifest.DamagedError(f"{file.name} holds {array.dtype} {array.shape}, not {np.dtype(dtype)} {expected}")
    return array


@dataclass(frozen=True, eq=False)
class PhotoSplit(Split):
    """One split of photographs; `images` has for each shard its encoded images, or their pixels, end to end.

    A gathered image is a box of the stored one, scaled to `image_shape`; without a box, its largest middle square.
    """

    shapes: list[Int64s]  # (N, 3) for each shard
    storage: Literal["raw", "jpeg"]
    stored_size: int | None

    def __post_init__(self) -> None:
        for content, shapes_N3 in zip(self._arrays, self.shapes, strict=True):
            ends_N = np.append(shapes_N3[1:, 0], content.size)
            sizes_N = shapes_N3[:, 1] * shapes_N3[:, 2] * self.image_shape[2]
            side = self.stored_size or self.image_shape[0]
            fits = (ends_N - shapes_N3[:, 0] == sizes_N) if self.storage == "raw" else ends_N > shapes_N3[:, 0]
            if shapes_N3[0, 0] or not (fits & (shapes_N3[:, 1:].min(axis=1) == side)).all():
                fault = f"{content.size} bytes of images do not have the shapes that are recorded"
                raise RunError(f"prepared set, {self.name}: {fault}; remove the set and run again to prepare it")

    @property
    def keeps_aspect(self) -> bool:
        """Whether images have their own shapes."""
        return self.stored_size is not None

    @cached_property
    def _starts(self) -> Int64s:
        return np.cumsum([0, *map(len, self.shapes)], dtype=np.int64)

    @cached_property
    def sizes_N2(self) -> Int64s:
        """Height and width of the stored images."""
        return np.concatenate([np.empty((0, 2), np.int64), *(shapes_N3[:, 1:] for shapes_N3 in self.shapes)])

    def image(self, index: int, box: Box | None = None) -> UInt8s:
        """One image (H, W, C)."""
        return self._read(int(self.shards_of(np.array(index))), index, box)

    def gather(self, indices: Int64s, out: UInt8s | None = None, boxes_N4: Int64s | None = None) -> UInt8s:
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

    def gather_by_shard(self, indices: Int64s, out: UInt8s) -> Int64s:
        """Decode samples (n, H, W, C) to `out`; returns their places in `indices` (n,)."""
        self.gather(indices, out)
        return np.arange(len(indices))

    def _read(self, shard: int, index: int, box: Box | None) -> UInt8s:
        number = index - int(self._starts[shard])
        _, height, width = self.shapes[shard][number].tolist()
        if box is None:
            side = min(height, width)
            box = (height - side) // 2, (width - side) // 2, side, side
        pixels_HWC, factor = self._decode(shard, number, min(box[2:]))
        row, column = (start // factor for start in box[:2])
        tall, wide = (max(1, length // factor) for length in box[2:])
        return scale_bytes(pixels_HWC[row : row + tall, column : column + wide], self.image_shape[:2], "bilinear")

    def _decode(self, shard: int, number: int, shortest: int = 0) -> tuple[UInt8s, int]:
        """The stored image, at the fraction of its size where twice the size of the result remains of `shortest`."""
        _, height, width = self.shapes[shard][number].tolist()
        content = self._arrays[shard][self._first_byte(shard, number) : self._first_byte(shard, number + 1)]
        side, _, channels = self.image_shape
        if self.storage == "raw":
            return content.reshape(height, width, channels), 1
        factor = next((factor for factor in DCT_SCALES if shortest >= 2 * factor * side), 1)
        rows, columns = -(-height // factor), -(-width // factor)
        pixels_HWC, decoded = np.empty((0, 0, 0), np.uint8), ""
        try:
            pixels_HWC = simplejpeg.decode_jpeg(content, COLOUR_SPACES[channels], min_height=rows, min_width=columns)
        except ValueError as error:
            decoded = one_line(error)
        if pixels_HWC.shape != (rows, columns, channels):
            raise RunError(
                f"prepared set, {self.name}, shard {shard}: image {number} is not the JPEG of {height} x {width} "
                f"pixels that was stored ({decoded or pixels_HWC.shape}); remove the set and run again to prepare it"
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
