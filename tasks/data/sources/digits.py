"""scikit-learn's 1,797 embedded digits, upright, or rotated with the angle as second target.

Needs no root and no network. The rotated set is one fixed data set, independent of a run's seed.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from paceline.conf.data import Data
from paceline.tasks.data.listing import Origin, SampleListing, hash_name, hold_out, split_in_three
from paceline.tasks.data.samples import Sample, Samples

CLASS_NAMES = tuple("0123456789")
NUM_ROTATED = 5_000
"""Rotated images in each of the two halves, training (with validation) and test."""
MAX_DEGREES = 45.0
_ROTATION_SEED = 20_261
_FILE = "datasets/data/digits.csv.gz"
"""In scikit-learn's package, in each row 64 pixels of 0 to 16 and the class."""


@functools.lru_cache(maxsize=1)
def _digits() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """All digits (1797, 8, 8) over the full range of uint8, and their classes."""
    table = _table()
    images = np.round(table[:, :-1].reshape(-1, 8, 8) * (255.0 / 16.0)).astype(np.uint8)
    return images, table[:, -1].astype(np.int64)


def _table() -> npt.NDArray[np.float64]:
    """Read the file itself, because importing scikit-learn takes a second in each process."""
    package = importlib.util.find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parent / _FILE
    if path.is_file():
        return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits  # of a version that keeps it elsewhere

    bunch = load_digits()
    return np.column_stack([bunch.data, bunch.target])


@functools.lru_cache(maxsize=1)
def _rotations() -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Source digit and angle in radians of each of the 2 x 5,000 rotated images.

    The two halves draw on disjoint source digits, each used equally often (to within one), so that classes stay
    balanced.
    """
    _, labels = _digits()
    upright = [Sample("digits", int(label), row=row) for row, label in enumerate(labels)]
    halves = hold_out(upright, 0.5)
    rng = np.random.Generator(np.random.PCG64(_ROTATION_SEED))
    sources = []
    for half in halves:
        pool = np.array([sample.row for sample in half], dtype=np.int64)
        sources.append(rng.permutation(np.resize(rng.permutation(pool), NUM_ROTATED)))
    limit = np.deg2rad(MAX_DEGREES)
    angles = rng.uniform(-limit, limit, size=2 * NUM_ROTATED).astype(np.float32)
    return np.concatenate(sources), angles


def list_digits(data: Data) -> SampleListing:
    """The upright digits, split by `test_fraction` and `validation_fraction`."""
    _, labels = _digits()
    samples = Samples.of(Sample("digits", int(label), row=row) for row, label in enumerate(labels))
    train, validation, test = split_in_three(samples, data)
    return SampleListing(Origin("digits"), CLASS_NAMES, train, validation, test, channels=1)


def list_rotated_digits(data: Data) -> SampleListing:
    """5,000 training and 5,000 test images; validation is taken from the training half, by source digit."""
    _, labels = _digits()
    sources, _ = _rotations()
    samples = Samples.of(Sample("rotated", int(labels[source]), row=row) for row, source in enumerate(sources))
    pool = sources[:NUM_ROTATED]
    held = np.isin(pool, list(_validation_sources({int(source) for source in pool}, data.validation_fraction)))
    return SampleListing(
        Origin("rotated_digits"),
        CLASS_NAMES,
        samples.take(np.flatnonzero(~held)),
        samples.take(np.flatnonzero(held)),
        samples[NUM_ROTATED:],
        channels=1,
        target_names=("angle",),
    )


def _validation_sources(pool: set[int], fraction: float) -> set[int]:
    _, labels = _digits()
    sources = [Sample("validation", int(labels[row]), row=row) for row in sorted(pool)]
    _, held = hold_out(sources, fraction, name=lambda sample: hash_name(f"validation of digit {sample.row}"))
    return {sample.row for sample in held}


def read_digits(samples: Samples, image_size: int) -> npt.NDArray[np.uint8]:
    """Grey images (N, S, S, 1) of upright digits."""
    images, _ = _digits()
    return _stack([_scale(images[sample.row], image_size) for sample in samples])


def read_rotated_digits(samples: Samples, image_size: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    """Grey images (N, S, S, 1) of rotated digits, and their angles (N, 1) in radians, counter-clockwise positive."""
    images, _ = _digits()
    sources, angles = _rotations()
    rotated = [
        _scale(images[sources[sample.row]], image_size).rotate(
            float(np.rad2deg(angles[sample.row])), resample=Image.Resampling.BICUBIC
        )
        for sample in samples
    ]
    return _stack(rotated), angles[[sample.row for sample in samples]][:, np.newaxis]


def _scale(image_HW: npt.NDArray[np.uint8], image_size: int) -> Image.Image:
    return Image.fromarray(image_HW).resize((image_size, image_size), Image.Resampling.BICUBIC)


def _stack(images: Sequence[Image.Image]) -> npt.NDArray[np.uint8]:
    return np.stack([np.asarray(image) for image in images])[..., np.newaxis]
