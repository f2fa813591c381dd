"""Compressed sounds: what lossless files hold, what others nearly hold, and what is damaged."""

import numpy as np
import pytest

from paceline.conf.data import Data
from paceline.tasks.data.decode import audio, waveform
from paceline.tasks.data.decode.transform import DecodeError
from paceline.tasks.data.key import preparation_key
from paceline.tasks.data.sources import registry as source
from paceline.tasks.data.sources import signals
from tests.support.signals import RATE, encode, sine, wav

SOUND = sine(1_000.0, seconds=0.5)


def test_flac_has_the_samples_of_wav():
    both = np.column_stack([SOUND, 0.5 * SOUND])
    for samples, layout in ((SOUND, "mono"), (both, "stereo")):
        ours, rate = waveform.decode(encode(samples, "flac", layout=layout), 1)
        theirs, same_rate = waveform.decode(wav(samples), 1)
        assert rate == same_rate == RATE
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(("form", "rate"), [("mp3", 16_000), ("mp3", 44_100), ("ogg", 44_100), ("opus", 48_000)])
def test_a_tone_stays_where_it_is(form, rate):
    samples_T, found = waveform.decode(encode(sine(1_000.0, rate), form, rate), 1)
    assert found == rate
    spectrum = np.abs(np.fft.rfft(samples_T))
    assert spectrum.argmax() * rate / len(samples_T) == pytest.approx(1_000, abs=2)
    assert samples_T[len(samples_T) // 4 : -len(samples_T) // 4].std() == pytest.approx(0.5 / 2**0.5, rel=0.1)


@pytest.mark.parametrize(
    "content",
    [
        encode(SOUND, "flac")[:2_000],
        encode(SOUND, "flac")[:50],
        encode(SOUND, "ogg")[:60],
        encode(SOUND, "mp3")[:20],
        b"fLaC" + b"\x00" * 200,
        b"OggS" + b"\x00" * 200,
        b"ID3" + b"\x00" * 200,
        b"\xff\xfb" + b"\x00" * 200,
    ],
    ids=range(8),  # an Ogg stream has a random number, which differs between processes
)
def test_what_is_damaged_has_a_reason_on_one_line(content):
    with pytest.raises(DecodeError) as caught:
        waveform.decode(content, RATE)
    assert str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_damaged_frame_of_flac_is_noticed():
    content = bytearray(encode(np.random.default_rng(0).normal(0, 0.1, RATE), "flac"))
    content[len(content) // 2] ^= 0xFF
    with pytest.raises(DecodeError):
        waveform.decode(bytes(content), RATE)


def test_no_more_is_decoded_than_is_allowed():
    with pytest.raises(DecodeError, match="more than 4000 samples"):
        audio.decode(encode(SOUND, "flac"), 4_000)


def test_pyav_is_part_of_the_key_only_where_it_decodes(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(3):
            (tmp_path / name / f"{number}.wav").write_bytes(wav(SOUND))
    data = Data(source="signals", root=str(tmp_path), image_size=32)
    listing = source.list_samples(data)
    assert signals.libraries(listing) == ("scipy", "pyarrow")
    before = preparation_key(listing, data)
    (tmp_path / "a" / "3.FLAC").write_bytes(encode(SOUND, "flac"))
    listing = source.list_samples(data)
    assert listing.num_samples == 7
    assert signals.libraries(listing) == ("scipy", "pyarrow", "av")
    assert preparation_key(listing, data) != before
