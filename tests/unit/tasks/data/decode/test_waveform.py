"""Signals out of files: every form that is understood gives the same numbers; what is damaged gives a reason."""

import struct
from fractions import Fraction

import numpy as np
import pytest

from paceline.conf.data import Signal
from paceline.tasks.data.decode import spectrogram, waveform
from paceline.tasks.data.decode.transform import DecodeError
from paceline.tasks.data.sources import signals
from tests.support.signals import RATE, npy, parquet, sine, wav

SOUND = sine(1_000.0, seconds=0.5)


@pytest.mark.parametrize(
    ("dtype", "error"), [(np.uint8, 2**-7), (np.int16, 2**-15), (np.int32, 2**-31), (np.float32, 1e-7)]
)
def test_a_wav_file_of_any_depth_has_an_amplitude_of_one_at_full_scale(dtype, error):
    content = wav((SOUND + 1) / 2 if dtype == np.uint8 else SOUND, dtype=dtype)
    found, rate = waveform.decode(content, 1)
    assert rate == RATE
    np.testing.assert_allclose(found, SOUND, atol=error)


def test_24_bits_and_the_extensible_header():
    """What studios write: fmt of 40 bytes, 3 bytes a sample, and a chunk that is none of our business."""
    values = np.round(SOUND * 2**23).astype(np.int32)
    data = values.astype("<i4").view(np.uint8).reshape(-1, 4)[:, :3].tobytes()
    guid = struct.pack("<H", 1) + b"\x00\x00\x00\x00\x10\x00\x80\x00\x00\xaa\x00\x38\x9b\x71"
    fmt = struct.pack("<HHIIHHHHI", 0xFFFE, 1, RATE, RATE * 3, 3, 24, 22, 24, 4) + guid
    chunks = b"fmt " + struct.pack("<I", len(fmt)) + fmt
    chunks += b"bext" + struct.pack("<I", 4) + b"note" + b"data" + struct.pack("<I", len(data)) + data
    found, rate = waveform.decode(b"RIFF" + struct.pack("<I", len(chunks) + 4) + b"WAVE" + chunks, 1)
    assert rate == RATE
    np.testing.assert_allclose(found, SOUND, atol=2**-23)


def test_channels_are_averaged_in_every_kind_of_file():
    both = np.column_stack([SOUND, np.zeros_like(SOUND)]).astype(np.float32)
    for content in (wav(both, dtype=np.float32), npy(both), parquet(left=both[:, 0], right=both[:, 1])):
        np.testing.assert_allclose(waveform.decode(content, RATE)[0], SOUND / 2, atol=1e-7)


@pytest.mark.parametrize("kind", ["stft", "log_mel"])
def test_wav_numpy_and_parquet_give_the_same_picture(kind):
    exact = SOUND.astype(np.float32)
    seconds = np.arange(len(exact)) / RATE
    stamps = np.datetime64("2026-01-01", "ns") + np.round(seconds * 1e9).astype("timedelta64[ns]")
    files = {
        "wav": wav(exact, dtype=np.float32),
        "npy": npy(exact),
        "parquet": parquet(signal=exact),
        "with seconds": parquet(time=seconds, signal=exact),
        "with timestamps": parquet(time=stamps, signal=exact),
        "any name": parquet(volts=exact),
    }
    signal = Signal(kind=kind)
    pictures = {name: signals.decode(content, signal, 32) for name, content in files.items()}
    for name, picture in pictures.items():
        assert np.array_equal(picture, pictures["wav"]), name
    assert pictures["wav"].max() == 255


def test_times_say_the_rate():
    content = parquet(time=np.arange(800) / 8_000, signal=SOUND[:800])
    assert waveform.decode(content, RATE)[1] == 8_000
    assert waveform.decode(parquet(signal=SOUND), 123)[1] == waveform.decode(npy(SOUND), 123)[1] == 123


@pytest.mark.parametrize(
    ("rate", "told"),
    [(12.5, Fraction(25, 2)), (1.5625, Fraction(25, 16)), (10.03, Fraction(1003, 100)), (44_099.5, 44_099)],
)
def test_times_say_a_rate_that_need_not_be_a_whole_number(rate, told):
    content = parquet(time=np.arange(800) / rate, signal=SOUND[:800])
    assert waveform.decode(content, RATE)[1] == pytest.approx(told, abs=1e-9 if rate < 1_000 else 1)


def test_a_rate_that_is_no_whole_number_keeps_its_frequencies():
    """Taken for 12, this tone of 3 Hz would be one of 2.88 Hz."""
    signal = Signal(sample_rate=25, clip_seconds=8.0, window_ms=320.0)
    times = np.arange(200) / 12.5
    samples_T, rate = waveform.decode(parquet(time=times, signal=np.sin(2 * np.pi * 3 * times)), 25)
    clip_T = spectrogram.cut(samples_T, rate, signal)
    assert len(clip_T) == 200
    assert np.abs(np.fft.rfft(clip_T)).argmax() == 3 * 8


def test_rates_without_a_sensible_ratio_are_refused():
    signal = Signal(sample_rate=9_999_999, clip_seconds=0.001, window_ms=0.1)
    with pytest.raises(
        DecodeError, match=r"1\.235235\d* samples per second, and data\.signal\.sample_rate=9999999 is \d+/\d+"
    ):
        spectrogram.cut(np.zeros(10), Fraction(1_234, 999), signal)


def test_integers_of_numpy_have_the_full_scale_of_their_type():
    quiet = np.round(SOUND * 2**15).astype(np.int16)
    np.testing.assert_allclose(waveform.decode(npy(quiet), RATE)[0], waveform.decode(wav(SOUND), RATE)[0], atol=0)


WHOLE = wav(SOUND)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty file"),
        (b"\x00" * 100, "neither a WAV nor a NumPy nor a Parquet file"),
        (WHOLE[: len(WHOLE) // 2], "Reached EOF prematurely"),
        (WHOLE[:20], ""),
        (WHOLE[:22] + b"\x00\x00" + WHOLE[24:], ""),
        (WHOLE[:24] + struct.pack("<I", 0) + WHOLE[28:], ""),
        (WHOLE[:20] + struct.pack("<H", 7) + WHOLE[22:], "MULAW"),
        (npy(SOUND)[:500], ""),
        (npy(np.zeros((2, 3, 4))), "numbers (samples) or (samples, channels) are needed"),
        (npy(np.zeros(0)), "0 samples"),
        (npy(np.array([1 + 2j])), "complex128"),
        (npy(np.array([0.0, np.nan])), "not a finite number"),
        (npy(np.array(["a"])), "numbers"),
        (b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(127) + b"\n", ""),
        (parquet(signal=SOUND)[:-20], ""),
        (parquet(word=["a", "b"]), "column word holds string"),
        (parquet(signal=[1.0, None]), "lacks 1 of 2 samples"),
        (parquet(time=[0.0, 1.0]), "no column of samples besides time"),
        (parquet(time=[0.0, 1.0, 5.0], signal=[0.0, 1.0, 2.0]), "does not have equal steps"),
        (parquet(time=[0.0, 0.0], signal=[0.0, 1.0]), "does not have equal steps"),
        (parquet(time=[0.0, 2.0], signal=[0.0, 1.0]), "0.5 samples per second; from 1 to 10000000 is understood"),
    ],
)
def test_what_is_damaged_has_a_reason_on_one_line(content, reason):
    with pytest.raises(DecodeError) as caught:
        waveform.decode(content, RATE)
    assert reason in str(caught.value)
    assert str(caught.value)
    assert "\n" not in str(caught.value)


def test_objects_are_not_unpickled(tmp_path):
    np.save(tmp_path / "evil.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(DecodeError, match="allow_pickle=False"):
        waveform.decode((tmp_path / "evil.npy").read_bytes(), RATE)


def test_hostile_bytes_are_refused_and_nothing_else_happens():
    rng = np.random.default_rng(1)
    originals = [wav(SOUND[:400]), npy(SOUND[:400]), parquet(time=np.arange(400) / 8_000, signal=SOUND[:400])]
    for number in range(300):
        content = bytearray(originals[number % 3])
        for place in rng.integers(0, min(len(content), 200), 3):
            content[place] = rng.integers(0, 256)
        try:
            samples, rate = waveform.decode(bytes(content), RATE)
        except DecodeError:
            continue
        assert np.isfinite(samples).all()
        assert 1 <= rate <= waveform.MAX_RATE
