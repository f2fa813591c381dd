"""Generated sounds: tones that rise, fall, stay or waver, in noise louder than they.

Each sound is a pure function of its row and of `data.signal`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from paceline.conf.data import Data
from paceline.conf.signal import Signal
from paceline.tasks.data.listing import Origin, SampleListing, complete_splits
from paceline.tasks.data.samples import Item, Sample, Samples

NUM_TONES = 1_800
CLASS_NAMES = ("falling", "rising", "steady", "wavering")
SNR_DB = -15.0
"""Power of the tone over that of the white noise, over all frequencies up to half of the sample rate."""
LOWEST, HIGHEST = 0.1, 0.6
"""Frequencies of the tones, of half of the sample rate."""
_AMPLITUDE = 0.1
_SEED = 20_263

Floats = npt.NDArray[np.float64]


def list_samples(data: Data) -> SampleListing:
    """All sounds, split by `test_fraction` and `validation_fraction`."""
    kinds = len(CLASS_NAMES)
    samples = Samples.of(Sample("tones", row % kinds, row=row) for row in range(NUM_TONES))
    splits = complete_splits({"train": samples}, data)
    return SampleListing(Origin("tones", signal=data.signal), CLASS_NAMES, *splits, channels=1)


def read_tones(origin: Origin, samples: Samples, image_size: int) -> Iterator[Item]:
    """Draw grey pictures (S, S, 1)."""
    from paceline.tasks.data.decode import spectrogram

    signal = origin.signal
    assert signal is not None
    for sample in samples:
        yield Item(spectrogram.draw(tone(sample.row, signal), signal.sample_rate, signal, image_size))


def tone(row: int, signal: Signal) -> Floats:
    """Samples of one sound, a clip long."""
    rng = np.random.default_rng((_SEED, row))
    clean_T = _AMPLITUDE * np.sin(phase(CLASS_NAMES[row % len(CLASS_NAMES)], rng, signal))
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
