"""Generated sets: scenes of shapes with masks, and textures. An image is a pure function of its row and its size."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from paceline.conf.data import Data
from paceline.tasks.data.listing import Origin, SampleListing, complete_splits
from paceline.tasks.data.samples import Item, Sample, Samples

NUM_SCENES, NUM_TEXTURES = 2_000, 1_200
SCENE_CLASSES = ("background", "disc", "square", "triangle")
TEXTURE_CLASSES = ("stripes", "checks", "rings")
MAX_SHAPES = 4
_SHAPES_SEED, _TEXTURES_SEED = 20_261, 20_262

Plane = npt.NDArray[np.float64]


def list_shapes(data: Data) -> SampleListing:
    """Scenes, split by `test_fraction` and `validation_fraction`; the last channel of an image is its mask."""
    samples = Samples.of(Sample("shapes", 0, row=row) for row in range(NUM_SCENES))
    return SampleListing(Origin("shapes"), SCENE_CLASSES, *complete_splits({"train": samples}, data), 3, num_planes=1)


def list_textures(data: Data) -> SampleListing:
    """Grey textures of three classes, split in the same way."""
    kinds = len(TEXTURE_CLASSES)
    samples = Samples.of(Sample("textures", row % kinds, row=row) for row in range(NUM_TEXTURES))
    return SampleListing(Origin("textures"), TEXTURE_CLASSES, *complete_splits({"train": samples}, data), channels=1)


def read_shapes(origin: Origin, samples: Samples, image_size: int) -> Iterator[Item]:
    """Draw scenes (S, S, 3) with the class of each pixel (S, S)."""
    return (Item(*_scene(sample.row, image_size)) for sample in samples)


def read_textures(origin: Origin, samples: Samples, image_size: int) -> Iterator[Item]:
    """Draw grey textures (S, S, 1)."""
    return (Item(_texture(sample.row, sample.label, image_size)) for sample in samples)


def _grid(size: int) -> tuple[Plane, Plane]:
    y, x = np.mgrid[0:size, 0:size] / size
    return y, x


def _scene(row: int, size: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    rng = np.random.default_rng((_SHAPES_SEED, row))
    y, x = _grid(size)
    slope = np.outer((y * rng.uniform(-1, 1) + x * rng.uniform(-1, 1)).ravel(), rng.uniform(-60, 60, 3))
    picture = rng.uniform(60, 196, 3) + slope.reshape(size, size, 3)
    mask = np.zeros((size, size), dtype=np.uint8)
    for _ in range(rng.integers(1, MAX_SHAPES + 1)):
        kind = int(rng.integers(1, len(SCENE_CLASSES)))
        middle_y, middle_x = rng.uniform(0.2, 0.8, 2)
        inside = _inside(kind, y - middle_y, x - middle_x, rng.uniform(0.12, 0.26), rng.uniform(0, 2 * np.pi))
        picture[inside] = rng.uniform(0, 255, 3)
        mask[inside] = kind
    picture += rng.normal(0, 8, picture.shape)
    return picture.clip(0, 255).astype(np.uint8), mask


def _inside(kind: int, y: Plane, x: Plane, radius: float, angle: float) -> npt.NDArray[np.bool_]:
    if kind == 1:
        return y * y + x * x < radius * radius
    corners = 4 if kind == 2 else 3  # noqa: PLR2004  as in SCENE_CLASSES
    inner = radius * np.cos(np.pi / corners)  # from the middle to a side
    sides = [angle + 2 * np.pi * side / corners for side in range(corners)]
    return np.asarray(np.logical_and.reduce([y * np.sin(side) + x * np.cos(side) < inner for side in sides]))


def _texture(row: int, label: int, size: int) -> npt.NDArray[np.uint8]:
    rng = np.random.default_rng((_TEXTURES_SEED, row))
    y, x = _grid(size)
    angle, waves = rng.uniform(0, np.pi), rng.uniform(2, 6)
    along, across = y * np.sin(angle) + x * np.cos(angle), y * np.cos(angle) - x * np.sin(angle)
    phases = rng.uniform(0, 2 * np.pi, 2)
    stripes = np.sin(2 * np.pi * waves * along + phases[0])
    if label == TEXTURE_CLASSES.index("checks"):
        stripes *= np.sin(2 * np.pi * waves * across + phases[1])
    elif label == TEXTURE_CLASSES.index("rings"):
        middle_y, middle_x = rng.uniform(0, 1, 2)
        stripes = np.sin(2 * np.pi * waves * np.hypot(y - middle_y, x - middle_x) + phases[0])
    if rng.integers(2):
        stripes = np.sign(stripes)  # sharp edges
    grey = (128 + rng.uniform(40, 110) * stripes).clip(0, 255)
    return np.asarray(grey, dtype=np.uint8)[..., np.newaxis]
