"""scikit-learn's 1,797 digits, upright, or rotated with the angle as second target; neither depends on a run's seed."""

import functools
import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from paceline.conf.data import Data
from paceline.tasks.data.listing import Origin, SampleListing, SplitName, hold_out
from paceline.tasks.data.samples import Item, Sample, Samples

CLASS_NAMES = tuple("0123456789")
NUM_ROTATED = 5_000  # rotated images in each of the two halves, training (with validation) and test
MAX_DEGREES = 45.0
_ROTATION_SEED = 20_261
_FILE = "datasets/data/digits.csv.gz"  # in scikit-learn's package, in each row 64 pixels of 0 to 16 and the class


@functools.lru_cache(maxsize=1)
def _digits() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """All digits (1797, 8, 8) over the full range of uint8, and their classes."""
    # The file itself, because importing scikit-learn takes a second in each process.
    package = importlib.util.find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parent / _FILE
    if path.is_file():
        table = np.loadtxt(path, delimiter=",")
    else:
        from sklearn.datasets import load_digits  # of a version that keeps it elsewhere

        table = np.column_stack(load_digits(return_X_y=True))
    images = np.round(table[:, :-1].reshape(-1, 8, 8) * (255.0 / 16.0)).astype(np.uint8)
    return images, table[:, -1].astype(np.int64)


@functools.lru_cache(maxsize=1)
def _rotations() -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Source digit and angle in radians of each of the 2 x 5,000 rotated images.

    The halves draw on disjoint source digits, each used equally often (to within one): the classes stay balanced.
    """
    _, labels = _digits()
    upright = [Sample("digits", int(label), row=row) for row, label in enumerate(labels)]
    halves = [np.array([sample.row for sample in half]) for half in hold_out(upright, 0.5)]
    rng = np.random.Generator(np.random.PCG64(_ROTATION_SEED))
    sources = [rng.permutation(np.resize(rng.permutation(half), NUM_ROTATED)) for half in halves]
    limit = np.deg2rad(MAX_DEGREES)
    angles = rng.uniform(-limit, limit, size=2 * NUM_ROTATED).astype(np.float32)
    return np.concatenate(sources), angles


def list_digits(data: Data) -> SampleListing:
    """The upright digits, split by `test_fraction` and `validation_fraction`."""
    _, labels = _digits()
    samples = Samples.of(Sample("digits", int(label), row=row) for row, label in enumerate(labels))
    return SampleListing.of(data, Origin("digits"), CLASS_NAMES, {"train": samples}, channels=1)


def list_rotated_digits(data: Data) -> SampleListing:
    """5,000 training and 5,000 test images; validation is taken from the training half, by source digit."""
    _, labels = _digits()
    sources, _ = _rotations()
    samples = Samples.of(Sample("rotated", int(labels[source]), row=row) for row, source in enumerate(sources))
    pool = sources[:NUM_ROTATED]
    names = {row: hashlib.sha256(f"validation of digit {row}".encode()).hexdigest() for row in np.unique(pool).tolist()}
    upright = [Sample(name, int(labels[row])) for row, name in names.items()]
    held = set(hold_out(upright, data.validation_fraction)[1].paths)
    is_held = np.isin(pool, [row for row, name in names.items() if name in held])
    splits: dict[SplitName, Samples] = {
        "train": samples.take(np.flatnonzero(~is_held)),
        "validation": samples.take(np.flatnonzero(is_held)),
        "test": samples[NUM_ROTATED:],
    }
    origin = Origin("rotated_digits")
    return SampleListing.of(data, origin, CLASS_NAMES, splits, channels=1, target_names=("angle",))


def read_digits(origin: Origin, samples: Samples, image_size: int) -> Iterator[Item]:
    """Draw upright digits (S, S, 1), grey."""
    images, _ = _digits()
    return (Item(np.asarray(_scale(images[sample.row], image_size))[..., np.newaxis]) for sample in samples)


def read_rotated_digits(origin: Origin, samples: Samples, image_size: int) -> Iterator[Item]:
    """Draw rotated digits (S, S, 1), grey, with their angles in radians, counter-clockwise positive."""
    images, _ = _digits()
    sources, angles = _rotations()
    for row in (sample.row for sample in samples):
        degrees = float(np.rad2deg(angles[row]))
        rotated = _scale(images[sources[row]], image_size).rotate(degrees, resample=Image.Resampling.BICUBIC)
        yield Item(np.asarray(rotated)[..., np.newaxis], None, angles[[row]])


def _scale(image_HW: npt.NDArray[np.uint8], image_size: int) -> Image.Image:
    return Image.fromarray(image_HW).resize((image_size, image_size), Image.Resampling.BICUBIC)
