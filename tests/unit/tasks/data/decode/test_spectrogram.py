"""Time-frequency images whose right answer is known: levels, frequencies, times, and the power that is kept."""

import numpy as np
import pytest
from scipy.signal import chirp

from paceline.conf.data import Signal
from paceline.tasks.data.decode.spectrogram import band_powers, bands, cut, decibels, draw, hertz, mel, quantise
from tests.support.signals import RATE, sine

SIZE = 64
KINDS = ["stft", "log_mel"]


def row_of(frequency, signal):
    """The row of a picture, from the top, in whose band a frequency lies."""
    top = signal.sample_rate / 2
    if signal.kind == "stft":
        cell = signal.sample_rate / signal.window_samples
        return SIZE - 1 - int((frequency - cell / 2) / (top / SIZE))
    corners = hertz(np.linspace(0, mel(top), SIZE + 2))
    return SIZE - 1 - int(np.abs(corners[1:-1] - frequency).argmin())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("frequency", [500.0, 1_000.0, 3_000.0, 4_500.0])
@pytest.mark.parametrize("rate", [RATE, 44_100, 48_000, 11_025])
def test_a_tone_lies_in_its_band_whatever_the_rate_of_its_file(kind, frequency, rate):
    signal = Signal(kind=kind, top_db=0.0)
    picture = draw(sine(frequency, rate), rate, signal, SIZE)[..., 0]
    brightest = picture.argmax(axis=0)
    assert np.abs(brightest[4:-4] - row_of(frequency, signal)).max() <= (0 if rate == RATE else 1)
    assert picture.shape == (SIZE, SIZE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("amplitude", [1.0, 0.5, 0.01])
@pytest.mark.parametrize("hop_ms", [None, 10.0])
def test_the_bands_of_a_tone_have_its_power_together(kind, amplitude, hop_ms):
    """Parseval: 20 log10 of the amplitude in decibels of a sine of amplitude 1."""
    signal = Signal(kind=kind, hop_ms=hop_ms)
    level_W = decibels(band_powers(sine(1_000.0, amplitude=amplitude), signal, SIZE).sum(axis=0))
    np.testing.assert_allclose(level_W, 20 * np.log10(amplitude), atol=1e-6)


def test_as_many_bands_as_frequencies_are_the_transform_itself():
    """A tone on a frequency of the transform: two thirds of its power there, a sixth in each neighbour (Hann)."""
    signal = Signal(kind="stft", window_ms=8.0)  # 128 samples: 64 frequencies of 125 Hz without that of the mean
    power_BW = band_powers(sine(1_000.0, amplitude=1.0), signal, SIZE)
    np.testing.assert_allclose(power_BW[7] / 0.5, 2 / 3, rtol=1e-9)
    np.testing.assert_allclose(power_BW[[6, 8]] / 0.5, 1 / 6, rtol=1e-9)
    assert np.array_equal(bands(signal, 65, 64), np.eye(65)[1:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_bands", [8, 40, 64, 256])
def test_bands_share_every_frequency_among_them_and_none_is_empty(kind, num_bands):
    signal = Signal(kind=kind)
    shares_BF = bands(signal, signal.window_samples // 2 + 1, num_bands)
    assert (shares_BF.sum(axis=1) > 0).all()
    assert shares_BF.min() >= 0
    corners = hertz(np.linspace(0, mel(RATE / 2), num_bands + 2))
    cell = RATE / signal.window_samples
    inside = slice(1, -1) if kind == "stft" else slice(int(corners[1] / cell) + 2, int(corners[-2] / cell) - 1)
    np.testing.assert_allclose(shares_BF.sum(axis=0)[inside], 1.0, atol=1e-9)


def test_mel_is_what_htk_has():
    assert mel(1_000.0) == pytest.approx(999.99, abs=0.01)
    np.testing.assert_allclose(hertz(np.array([mel(440.0)])), 440.0)


def test_greys_are_decibels_to_half_a_step():
    signal = Signal(dynamic_range_db=80.0, top_db=0.0)
    level = np.linspace(-90.0, 10.0, 5_001)
    told = quantise(level, signal) / 255 * 80.0 - 80.0
    inside = (level >= -80) & (level <= 0)
    assert np.abs(told - level)[inside].max() <= 80 / 510 + 1e-9
    assert (told[level < -80] == -80).all()
    assert (told[level > 0] == 0).all()


@pytest.mark.parametrize("top_db", [None, 0.0])
def test_loudness_counts_only_where_the_top_is_given(top_db):
    loud, soft = (draw(sine(1_000.0, amplitude=it), RATE, Signal(top_db=top_db), SIZE) for it in (0.9, 0.09))
    assert np.array_equal(loud, soft) == (top_db is None)
    if top_db is not None:
        assert int(loud.max()) - int(soft.max()) == pytest.approx(255 * 20 / 80, abs=1), "20 dB of 80"


@pytest.mark.parametrize(
    "samples", [np.zeros(100), np.zeros(30_000), np.full(20_000, 9.81)], ids=["few", "many", "even"]
)
@pytest.mark.parametrize("top_db", [None, 0.0])
def test_silence_is_black(samples, top_db):
    assert draw(samples, RATE, Signal(top_db=top_db), SIZE).max() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_chirp_rises_in_time(kind):
    seconds = np.arange(RATE) / RATE
    picture = draw(chirp(seconds, 500, 1, 6_000), RATE, Signal(kind=kind), SIZE)[..., 0]
    brightest = picture.argmax(axis=0)
    assert (np.diff(brightest) <= 0).all(), "upwards is a smaller row"
    assert brightest[0] - brightest[-1] > SIZE // 3
    backwards = draw(chirp(seconds, 500, 1, 6_000)[::-1].copy(), RATE, Signal(kind=kind), SIZE)[..., 0]
    assert (np.diff(backwards.argmax(axis=0)) >= 0).all()


def test_columns_are_in_their_time():
    """A beep in the third quarter of a clip is in the third quarter of its columns, for every kind of hop."""
    beep = sine(1_000.0) * ((np.arange(RATE) >= RATE // 2) & (np.arange(RATE) < 3 * RATE // 4))
    for hop_ms, window_ms in ((None, 32.0), (4.0, 32.0), (32.0, 32.0), (None, 4.0)):
        picture = draw(beep, RATE, Signal(hop_ms=hop_ms, window_ms=window_ms, top_db=0.0), SIZE)[..., 0]
        loud = np.flatnonzero(picture.max(axis=0) > 200)
        assert abs(loud[0] - SIZE // 2) <= 2
        assert abs(loud[-1] - 3 * SIZE // 4) <= 2


def test_a_clip_is_the_middle():
    signal = Signal(clip_seconds=0.5)
    ramp = np.arange(RATE, dtype=np.float64)
    assert np.array_equal(cut(ramp, RATE, signal), ramp[RATE // 4 : 3 * RATE // 4])
    short = cut(np.ones(100), RATE, signal)
    assert len(short) == RATE // 2
    assert short.sum() == 100
    assert np.flatnonzero(short)[0] == (RATE // 2 - 100) // 2


def test_of_a_long_recording_only_the_middle_is_resampled_to_the_same():
    rate, seconds = 44_100, 20
    sound = sine(700.0, rate, seconds) + sine(3_000.0, rate, seconds)
    whole = cut(sound, rate, Signal(clip_seconds=20.0))
    middle = cut(sound, rate, Signal(clip_seconds=1.0))
    start = (len(whole) - RATE) // 2
    np.testing.assert_allclose(middle, whole[start : start + RATE], atol=1e-9)


@pytest.mark.parametrize("size", [8, 32, 63, 128])
@pytest.mark.parametrize("changes", [{}, {"num_bands": 8}, {"window_ms": 7.3}, {"clip_seconds": 0.2}, {"hop_ms": 1.0}])
@pytest.mark.parametrize("kind", KINDS)
def test_every_setting_fills_the_picture(size, changes, kind):
    signal = Signal(kind=kind, **changes)
    noise = np.random.default_rng(0).normal(0, 0.1, RATE)
    picture = draw(noise, RATE, signal, size)
    assert picture.shape == (size, size, 1)
    assert picture.dtype == np.uint8
    assert picture.max() == 255
    assert (picture.max(axis=0) > 0).all()
