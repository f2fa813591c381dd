"""Generated clips: a textured patch that drifts in one of four directions over noise.

What leaves the picture on one side comes back on the other, and a patch begins anywhere, so that no single frame shows
the class. Each clip is a pure function of its row, its size and its length. Shapes: T frames, S pixels, C colours.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from paceline.conf.data import NUM_COLOURS, Data
from paceline.tasks.data.listing import Origin, SampleListing, complete_splits
from paceline.tasks.data.samples import Item, Sample, Samples

NUM_MOTIONS = 1_600
CLASS_NAMES = ("east", "north", "west", "south")
"""In steps of 90 degrees; so "right" is not the name of a class."""
SLOWEST, FASTEST = 0.05, 0.08
"""Per frame, of the picture's side."""
GROUND, LIGHT, CONTRAST = 80.0, 70.0, 50.0
"""Levels of 255: of the ground, of the mean of a patch, and of its texture."""
NOISE = 20.0
"""Standard deviation in each pixel of each frame, of 255."""
_SEED = 20_264

Floats = npt.NDArray[np.float64]


def list_samples(data: Data) -> SampleListing:
    """All clips, split by `test_fraction` and `validation_fraction`."""
    kinds = len(CLASS_NAMES)
    samples = Samples.of(Sample("motions", row % kinds, row=row) for row in range(NUM_MOTIONS))
    origin, splits = Origin("motions", num_frames=data.num_frames), complete_splits({"train": samples}, data)
    return SampleListing(origin, CLASS_NAMES, *splits, channels=NUM_COLOURS * data.num_frames)


def read_motions(origin: Origin, samples: Samples, image_size: int) -> Iterator[Item]:
    """Draw clips (S, S, T * C)."""
    return (Item(_motion(sample.row, sample.label, origin.num_frames, image_size)) for sample in samples)


def step_of(label: int) -> tuple[float, float]:
    """Rows and columns of a step of length 1; rows count downwards."""
    angle = 2 * np.pi * label / len(CLASS_NAMES)
    return -float(np.sin(angle)), float(np.cos(angle))


def _motion(row: int, label: int, num_frames: int, size: int) -> npt.NDArray[np.uint8]:
    rng = np.random.default_rng((_SEED, row))
    (start_y, start_x), speed = rng.uniform(0, 1, 2), rng.uniform(SLOWEST, FASTEST)
    radius, (wave_y, wave_x) = rng.uniform(0.12, 0.18), rng.uniform(-5, 5, 2)
    phase_C = np.exp(1j * rng.uniform(0, 2 * np.pi, NUM_COLOURS))
    step_y, step_x = step_of(label)
    frames = []
    for frame in range(num_frames):
        y = _around(size, start_y + frame * speed * step_y)
        x = _around(size, start_x + frame * speed * step_x)
        window_SS = np.outer(np.exp(-(y * y) / (2 * radius * radius)), np.exp(-(x * x) / (2 * radius * radius)))
        wave_SS = np.outer(np.exp(2j * np.pi * wave_y * y), np.exp(2j * np.pi * wave_x * x))
        texture_SSC = (wave_SS[..., np.newaxis] * phase_C).real
        frames.append(GROUND + window_SS[..., np.newaxis] * (LIGHT + CONTRAST * texture_SSC))
    picture = np.concatenate(frames, axis=2)
    picture += rng.normal(0, NOISE, picture.shape)
    return picture.clip(0, 255).astype(np.uint8)


def _around(size: int, middle: float) -> Floats:
    """Periodic distance, from -0.5 to 0.5, of each pixel from the middle, in sides."""
    return np.asarray((np.arange(size) / size - middle + 0.5) % 1.0 - 0.5)
