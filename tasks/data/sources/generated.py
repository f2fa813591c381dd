"""Generated sets: scenes of shapes with masks, textures, clips of motions, and tones.

A sample is a pure function of its row and of its size, length or signal. Shapes: T frames or samples in time, S pixels,
C colours.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.conf.data import NUM_COLOURS, Data, Signal
from paceline.tasks.data.listing import Origin, SampleListing
from paceline.tasks.data.samples import Item, Sample, Samples

SCENE_CLASSES = ("background", "disc", "square", "triangle")
TEXTURE_CLASSES = ("stripes", "checks", "rings")
MAX_SHAPES = 4
_SHAPES_SEED, _TEXTURES_SEED = 20_261, 20_262

MOTION_CLASSES = ("east", "north", "west", "south")  # in steps of 90 degrees; so "right" is not the name of a class
SLOWEST, FASTEST = 0.05, 0.08  # per frame, of the picture's side
GROUND, LIGHT, CONTRAST = 80.0, 70.0, 50.0  # levels of 255: of the ground, of the mean of a patch, and of its texture
NOISE = 20.0  # standard deviation in each pixel of each frame, of 255
_MOTIONS_SEED = 20_264

TONE_CLASSES = ("falling", "rising", "steady", "wavering")
SNR_DB = -15.0  # power of the tone over that of the white noise, over all frequencies up to half of the sample rate
LOWEST, HIGHEST = 0.1, 0.6  # frequencies of the tones, of half of the sample rate
_AMPLITUDE = 0.1
_TONES_SEED = 20_263

Floats = npt.NDArray[np.float64]


class _Set(NamedTuple):
    class_names: tuple[str, ...]
    num_samples: int
    channels: int  # of a picture or a frame
    num_planes: int = 0


_SETS = {
    "shapes": _Set(SCENE_CLASSES, 2_000, NUM_COLOURS, num_planes=1),
    "textures": _Set(TEXTURE_CLASSES, 1_200, 1),
    "motions": _Set(MOTION_CLASSES, 1_600, NUM_COLOURS),
    "tones": _Set(TONE_CLASSES, 1_800, 1),
}


def list_samples(kind: str, data: Data) -> SampleListing:
    """Samples of a generated set, whose classes take turns."""
    class_names, num_samples, channels, num_planes = _SETS[kind]
    num_labels, num_frames = 1 if num_planes else len(class_names), data.num_frames if kind == "motions" else 0
    samples = Samples.of(Sample(kind, row % num_labels, row=row) for row in range(num_samples))
    origin = Origin(kind, signal=data.used_signal, num_frames=num_frames)
    facts: dict[str, Any] = {"channels": channels * max(1, num_frames), "num_planes": num_planes}
    return SampleListing.of(data, origin, class_names, {"train": samples}, **facts)


def read_shapes(origin: Origin, samples: Samples, image_size: int) -> Iterator[Item]:
    """Draw scenes (S, S, 3) with the class of each pixel (S, S)."""
    y, x = np.mgrid[0:image_size, 0:image_size] / image_size
    for sample in samples:
        rng = np.random.default_rng((_SHAPES_SEED, sample.row))
        slope = np.outer((y * rng.uniform(-1, 1) + x * rng.uniform(-1, 1)).ravel(), rng.uniform(-60, 60, 3))
        picture = rng.uniform(60, 196, 3) + slope.reshape(image_size, image_size, 3)
        mask = np.zeros((image_size, image_size), dtype=np.uint8)
        for _ in range(rng.integers(1, MAX_SHAPES + 1)):
            kind = int(rng.integers(1, len(SCENE_CLASSES)))
            middle_y, middle_x = rng.uniform(0.2, 0.8, 2)
            inside = _inside(kind, y - middle_y, x - middle_x, rng.uniform(0.12, 0.26), rng.uniform(0, 2 * np.pi))
            picture[inside] = rng.uniform(0, 255, 3)
            mask[inside] = kind
        picture += rng.normal(0, 8, picture.shape)
        yield Item(picture.clip(0, 255).astype(np.uint8), mask)


def _inside(kind: int, y: Floats, x: Floats, radius: float, angle: float) -> npt.NDArray[np.bool_]:
    if kind == 1:
        return y * y + x * x < radius * radius
    corners = 4 if kind == 2 else 3  # noqa: PLR2004  as in SCENE_CLASSES
    inner = radius * np.cos(np.pi / corners)  # from the middle to a side
    sides = [angle + 2 * np.pi * side / corners for side in range(corners)]
    return np.asarray(np.logical_and.reduce([y * np.sin(side) + x * np.cos(side) < inner for side in sides]))


def read_textures(origin: Origin, samples: Samples, image_size: int) -> Iterator[Item]:
    """Draw grey textures (S, S, 1)."""
    y, x = np.mgrid[0:image_size, 0:image_size] / image_size
    for sample in samples:
        rng = np.random.default_rng((_TEXTURES_SEED, sample.row))
        kind = TEXTURE_CLASSES[sample.row % len(TEXTURE_CLASSES)]  # not the label, which is among `data.classes`
        angle, waves = rng.uniform(0, np.pi), rng.uniform(2, 6)
        along, across = y * np.sin(angle) + x * np.cos(angle), y * np.cos(angle) - x * np.sin(angle)
        phases = rng.uniform(0, 2 * np.pi, 2)
        stripes = np.sin(2 * np.pi * waves * along + phases[0])
        if kind == "checks":
            stripes *= np.sin(2 * np.pi * waves * across + phases[1])
        elif kind == "rings":
            middle_y, middle_x = rng.uniform(0, 1, 2)
            stripes = np.sin(2 * np.pi * waves * np.hypot(y - middle_y, x - middle_x) + phases[0])
        if rng.integers(2):
            stripes = np.sign(stripes)  # sharp edges
        grey = (128 + rng.uniform(40, 110) * stripes).clip(0, 255)
        yield Item(np.asarray(grey, dtype=np.uint8)[..., np.newaxis])


def read_motions(origin: Origin, samples: Samples, image_size: int) -> Iterator[Item]:
    """Draw clips (S, S, T * C) of a textured patch that drifts over noise.

    What leaves on one side comes back on the other, and a patch starts anywhere: no single frame shows the class.
    """
    for sample in samples:
        rng = np.random.default_rng((_MOTIONS_SEED, sample.row))
        (start_y, start_x), speed = rng.uniform(0, 1, 2), rng.uniform(SLOWEST, FASTEST)
        radius, (wave_y, wave_x) = rng.uniform(0.12, 0.18), rng.uniform(-5, 5, 2)
        phase_C = np.exp(1j * rng.uniform(0, 2 * np.pi, NUM_COLOURS))
        step_y, step_x = step_of(sample.row % len(MOTION_CLASSES))
        frames = []
        for frame in range(origin.num_frames):
            y = _around(image_size, start_y + frame * speed * step_y)
            x = _around(image_size, start_x + frame * speed * step_x)
            window_SS = np.outer(np.exp(-(y * y) / (2 * radius * radius)), np.exp(-(x * x) / (2 * radius * radius)))
            wave_SS = np.outer(np.exp(2j * np.pi * wave_y * y), np.exp(2j * np.pi * wave_x * x))
            texture_SSC = (wave_SS[..., np.newaxis] * phase_C).real
            frames.append(GROUND + window_SS[..., np.newaxis] * (LIGHT + CONTRAST * texture_SSC))
        picture = np.concatenate(frames, axis=2)
        picture += rng.normal(0, NOISE, picture.shape)
        yield Item(picture.clip(0, 255).astype(np.uint8))


def step_of(label: int) -> tuple[float, float]:
    """Rows and columns of a step of length 1; rows count downwards."""
    angle = 2 * np.pi * label / len(MOTION_CLASSES)
    return -float(np.sin(angle)), float(np.cos(angle))


def _around(size: int, middle: float) -> Floats:
    """Periodic distance, from -0.5 to 0.5, of each pixel from the middle, in sides."""
    return np.asarray((np.arange(size) / size - middle + 0.5) % 1.0 - 0.5)


def read_tones(origin: Origin, samples: Samples, image_size: int) -> Iterator[Item]:
    """Draw grey pictures (S, S, 1)."""
    from paceline.tasks.data.decode import spectrogram

    signal = origin.signal
    assert signal is not None
    for sample in samples:
        yield Item(spectrogram.draw(tone(sample.row, signal), signal.sample_rate, signal, image_size))


def tone(row: int, signal: Signal) -> Floats:
    """Samples of one sound, a clip long."""
    rng = np.random.default_rng((_TONES_SEED, row))
    clean_T = _AMPLITUDE * np.sin(phase(TONE_CLASSES[row % len(TONE_CLASSES)], rng, signal))
    noise_power = _AMPLITUDE**2 / 2 / 10 ** (SNR_DB / 10)
    return np.asarray(clean_T + rng.normal(0, np.sqrt(noise_power), len(clean_T)))


def phase(name: str, rng: np.random.Generator, signal: Signal) -> Floats:
    """Radians at each sample of a clip: 2 pi times the integral of the frequency, from any phase."""
    share_T = np.arange(signal.clip_samples) / signal.clip_samples
    low, high = np.array([LOWEST, HIGHEST]) * signal.sample_rate / 2
    span = high - low
    if name == "steady":
        frequency_T = np.full(len(share_T), rng.uniform(low, high))
    elif name == "wavering":
        turns, depth = rng.uniform(2, 4), rng.uniform(0.1, 0.2) * span
        middle = rng.uniform(low + depth, high - depth)
        frequency_T = middle + depth * np.sin(2 * np.pi * (turns * share_T + rng.uniform()))
    else:
        rise = rng.uniform(0.2, 0.6) * span
        start = rng.uniform(low, high - rise)
        frequency_T = start + rise * (share_T if name == "rising" else 1 - share_T)
    return np.asarray(2 * np.pi * (np.cumsum(frequency_T) / signal.sample_rate + rng.uniform()))
