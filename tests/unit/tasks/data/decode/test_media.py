"""Compressed sounds and frames of videos: what files hold, what is nearly it, and what is damaged, with the reason."""

import io
import struct

import numpy as np
import pytest
from PIL import Image

from paceline.conf.data import Data
from paceline.tasks.data.decode import media, waveform
from paceline.tasks.data.decode.transform import DecodeError
from paceline.tasks.data.key import preparation_key
from paceline.tasks.data.sources import registry as source
from paceline.tasks.data.sources import signals
from tests.support import clips
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
        media.decode_audio(encode(SOUND, "flac"), 4_000)


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


def levels(content, num_frames, size=16):
    """The mean grey of each decoded frame."""
    pixels = media.decode_video(content, num_frames, size)
    assert pixels.shape == (size, size, 3 * num_frames)
    return pixels.reshape(-1, num_frames, 3).mean(axis=(0, 2))


@pytest.mark.parametrize(
    ("there", "wanted", "found"),
    [(8, 8, [0, 1, 2, 3, 4, 5, 6, 7]), (9, 3, [1, 4, 7]), (10, 2, [2, 7]), (1000, 4, [125, 375, 625, 875])],
)
def test_the_middle_frames_of_equal_parts_are_taken(there, wanted, found):
    assert media.places(there, wanted) == found


def test_no_frame_is_taken_twice():
    for there in range(2, 70):
        for wanted in range(2, there + 1):
            found = media.places(there, wanted)
            assert found == sorted(set(found))
            assert 0 <= found[0] <= found[-1] < there
            assert found == [there - 1 - place for place in reversed(found)] or (there / wanted) % 2 != 1


@pytest.mark.parametrize("suffix", clips.SUFFIXES)
def test_frames_of_every_kind_of_file_are_the_right_ones(suffix):
    found = levels(clips.video(clips.grey_levels(30), suffix), 5)
    np.testing.assert_allclose(found, [4 * number for number in (3, 9, 15, 21, 27)], atol=3.9)


def test_a_lossless_video_keeps_its_pixels_and_is_cropped_as_images_are():
    frames = clips.frames_of("right", 4, size=(32, 48), seed=3)
    decoded = media.decode_video(clips.video(frames), 4, 32)
    expected = np.concatenate(frames[:, :, 8:40], axis=2)
    assert np.array_equal(decoded, expected)


def test_an_animation_is_a_video():
    buffer = io.BytesIO()
    images = [Image.fromarray(frame) for frame in clips.grey_levels(12)]
    images[0].save(buffer, "gif", save_all=True, append_images=images[1:], duration=40)
    np.testing.assert_allclose(levels(buffer.getvalue(), 4), [4, 16, 28, 40], atol=1)


def turned(content, matrix):
    """An .mp4 whose track header has another display matrix (ISO/IEC 14496-12, 8.3.2)."""
    at = content.index(b"tkhd") + 4 + 40
    return content[:at] + struct.pack(">9i", *matrix) + content[at + 36 :]


def test_a_video_of_a_turned_phone_is_upright():
    frames = np.full((4, 32, 32, 3), 20, np.uint8)
    frames[:, :16, :16] = 230
    one = 1 << 16
    plain = clips.video(frames, "mp4")
    # A quarter turn clockwise: a point (x, y) is shown at (32 - y, x), and what was at the left top at the right top.
    clockwise = turned(plain, (0, one, 0, -one, 0, 0, 32 * one, 0, 1 << 30))
    for content, corner in ((plain, (0, 0)), (clockwise, (0, 1))):
        quarters = media.decode_video(content, 2, 32)[..., 0].reshape(2, 16, 2, 16).mean(axis=(1, 3))
        assert np.unravel_index(quarters.argmax(), (2, 2)) == corner


def test_damaged_videos_tell_why():
    whole = {suffix: clips.video(clips.grey_levels(30), suffix) for suffix in clips.SUFFIXES}
    for suffix, content in whole.items():
        for share in (0.0, 0.02, 0.3, 0.5, 0.7):
            with pytest.raises(DecodeError) as error:
                media.decode_video(content[: int(share * len(content))], 4, 16)
            assert "\n" not in str(error.value), (suffix, share)
    with pytest.raises(DecodeError, match=r"\b3\b.*\bdata\.num_frames=4\b"):
        media.decode_video(clips.video(clips.grey_levels(3)), 4, 16)
    with pytest.raises(DecodeError, match="Invalid data"):
        media.decode_video(b"no video at all" * 100, 4, 16)


def test_a_playlist_opens_nothing(tmp_path):
    """Or a file of the data could have the workers read other files and addresses."""
    (tmp_path / "part.ts").write_bytes(clips.video(clips.grey_levels(12), "mpegts", "mpeg4"))
    lines = ["#EXTM3U", "#EXT-X-TARGETDURATION:1", "#EXTINF:1,", f"file://{tmp_path}/part.ts", "#EXT-X-ENDLIST"]
    assert len(levels((tmp_path / "part.ts").read_bytes(), 4)) == 4
    with pytest.raises(DecodeError, match="Invalid data"):
        media.decode_video("\n".join(lines).encode(), 4, 16)
    concat = f"ffconcat version 1.0\nfile {tmp_path}/part.ts\n"
    with pytest.raises(DecodeError, match="Invalid argument"):
        media.decode_video(concat.encode(), 4, 16)
