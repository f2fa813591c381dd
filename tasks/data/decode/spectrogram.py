"""Draws a signal as a time-frequency image: bands from low (the last row) to high, time from left to right.

With a change of a pixel `SPECTROGRAM_VERSION` must grow (`sources/signals.py`): it is part of the key of prepared sets.

Each row is the power in a band. Windows of Hann give the power density (Welch 1967) at the frequencies of the discrete
Fourier transform; a band takes of each of these cells the share that lies in it. The shares of all bands add up to 1
(but below the middle of the first mel band and above that of the last), so that their powers add up to the signal's
(Parseval). The mel scale is O'Shaughnessy's ("Speech Communication", 1987), which HTK uses: 2595 log10(1 + f / 700 Hz).

Shapes: T samples in time, F frequencies, W windows, B bands, H height, W width.
"""

from fractions import Fraction
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy import signal as scipy_signal

from paceline.conf.data import Signal
from paceline.tasks.data.decode.transform import DecodeError

SINE_POWER = 0.5  # power of a sine of amplitude 1, which is 0 dB
WHITE = 255
_SILENCE = 1e-26  # power of the rounding errors of a constant, below any instrument: -257 dB
_FILTER_TAPS = 10  # on each side, of SciPy's filter for resampling, in samples of the lower rate
_MAX_RATIO = 10_000_000
"""Largest numerator or denominator of a ratio of rates: the filter has 20 taps for each, so many of them are 1.6 GB."""

Floats = npt.NDArray[np.float64]


def draw(samples_T: Floats, rate: int | Fraction, signal: Signal, image_size: int) -> npt.NDArray[np.uint8]:
    """Draw a clip of a signal of `rate` samples per second, grey (image_size, image_size, 1); errors as in `cut`."""
    level_BW = decibels(band_powers(cut(samples_T, rate, signal), signal, image_size))
    rows = overlaps(np.linspace(0, len(level_BW), image_size + 1), len(level_BW))
    level_HW = (rows / rows.sum(axis=1, keepdims=True)) @ level_BW
    return quantise(level_HW, signal)[::-1, :, np.newaxis]


def cut(samples_T: Floats, rate: int | Fraction, signal: Signal) -> Floats:
    """A signal's middle, resampled, in silence if it is short; DecodeError if the rates' ratio has large numbers."""
    ratio = Fraction(signal.sample_rate) / rate
    if max(ratio.numerator, ratio.denominator) > _MAX_RATIO:
        rates = f"{float(rate):.10g} samples per second, and data.signal.sample_rate={signal.sample_rate}"
        fault = f"{rates} is {ratio} times that; numbers up to {_MAX_RATIO} are understood"
        raise DecodeError(f"{fault}; use a lower sample_rate")
    number = signal.clip_samples
    if ratio != 1:
        samples_T = _resample_middle(samples_T, ratio.numerator, ratio.denominator, number)
    if len(samples_T) >= number:
        start = (len(samples_T) - number) // 2
        return samples_T[start : start + number]
    before = (number - len(samples_T)) // 2
    return np.pad(samples_T, (before, number - len(samples_T) - before))


def _resample_middle(samples_T: Floats, up: int, down: int, number: int) -> Floats:
    """The samples that are in the middle of a resampled signal; of a long one, no more is resampled than they need."""
    total = -(-len(samples_T) * up // down)
    first = max(0, (total - number) // 2)
    margin = _FILTER_TAPS * max(1, -(-down // up))
    start = max(0, first * down // up - margin) // down * down  # where both have a sample
    stop = (first + number) * down // up + margin + 1
    resampled: Floats = scipy_signal.resample_poly(samples_T[start:stop], up, down)
    skipped = first - start // down * up
    return resampled[skipped : skipped + min(number, total)]


def band_powers(clip_T: Floats, signal: Signal, num_columns: int) -> Floats:
    """Power (B, num_columns) of each band, the lowest first; windows lie wholly in the clip, each without its mean."""
    window, hop = signal.window_samples, signal.hop_samples(num_columns)
    frequencies_F, _, density_FW = scipy_signal.spectrogram(
        clip_T, signal.sample_rate, window="hann", nperseg=window, noverlap=window - hop, detrend="constant"
    )
    shares_BF = bands(signal, len(frequencies_F), signal.num_bands or num_columns)
    power_BW = shares_BF @ density_FW * (signal.sample_rate / window)
    columns = overlaps(np.linspace(0, power_BW.shape[1], num_columns + 1), power_BW.shape[1])
    mean_BW: Floats = power_BW @ (columns / columns.sum(axis=1, keepdims=True)).T
    return mean_BW


@lru_cache(maxsize=8)
def bands(signal: Signal, num_frequencies: int, num_bands: int) -> Floats:
    """The share (B, F) that each band has of the cell of each frequency, a cell being as wide as their distance."""
    cell, top = signal.sample_rate / signal.window_samples, signal.sample_rate / 2
    if signal.kind == "stft":
        # From the upper edge of the first cell, which is that of the mean: as many bands as cells are these themselves.
        return overlaps((np.linspace(0, top, num_bands + 1) + cell / 2) / cell + 0.5, num_frequencies)
    corners = hertz(np.linspace(0, mel(top), num_bands + 2))
    edges = np.linspace(-0.5, num_frequencies - 0.5, num_frequencies + 1) * cell
    return np.array([np.diff(_area_of_triangle(edges, *corners[band:][:3])) / cell for band in range(num_bands)])


def mel(frequency: float) -> float:
    """Mels of a frequency in hertz."""
    return float(2595 * np.log10(1 + frequency / 700))


def hertz(mels: Floats) -> Floats:
    """Frequencies in hertz of mels."""
    return np.asarray(700 * (10 ** (mels / 2595) - 1))


def _area_of_triangle(x: Floats, low: float, middle: float, high: float) -> Floats:
    """Up to each x, of a triangle of height 1."""
    rising = np.clip(x - low, 0, middle - low) ** 2 / (2 * (middle - low))
    remaining = np.clip(high - x, 0, high - middle)
    falling = ((high - middle) ** 2 - remaining**2) / (2 * (high - middle))
    return np.asarray(rising + falling)


def overlaps(edges: Floats, number: int) -> Floats:
    """Overlap of each interval between two edges with each cell [0, 1], [1, 2] ...: (edges - 1, number)."""
    inside = np.clip(edges[:, np.newaxis], np.arange(number), np.arange(1, number + 1))
    return np.diff(inside, axis=0)


def decibels(power: Floats) -> Floats:
    """Level relative to a sine of amplitude 1; silence has the level of rounding errors."""
    return np.asarray(10 * np.log10(np.maximum(power, _SILENCE) / SINE_POWER))


def quantise(level: Floats, signal: Signal) -> npt.NDArray[np.uint8]:
    """Decibels as greys, in 1/255 of the dynamic range; what is below is black, and so is silence, for any white."""
    top = signal.top_db
    if top is None:
        top = float(level.max()) if level.max() > decibels(np.zeros(1))[0] else np.inf
    share = (level - (top - signal.dynamic_range_db)) / signal.dynamic_range_db
    return np.asarray(np.round(share.clip(0, 1) * WHITE), dtype=np.uint8)
