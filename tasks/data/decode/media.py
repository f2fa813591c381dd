"""Decodes sounds (FLAC, MP3, Ogg) and frames of videos by FFmpeg, in one thread: many workers decode at once."""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from itertools import chain
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from paceline.tasks.data.decode.transform import MAX_PIXELS, DecodeError, resize
from paceline.tasks.errors import one_line

DEMUXERS = {"audio": "flac,mp3,ogg", "video": "mov,avi,matroska,mpeg,mpegvideo,mpegts,flv,asf,ogg,gif"}
"""FFmpeg's names of what is read. Others are refused: playlists, for one, open files and addresses that they name."""
# Share of the length in its header without which a file was cut off: exact for FLAC, an estimate for other codecs.
WHOLE, FLAC_WHOLE = 0.9, 1.0
_DTYPES = {"u8": "u8p", "s16": "s16p", "s32": "s32p"}  # kinds of integers, in planes; others become float32
_QUARTER_TURN = 90


@contextmanager
def _open(content: bytes, kind: Literal["audio", "video"]) -> Iterator[tuple[Any, Any]]:
    """Open a file's first stream of a kind; what FFmpeg raises meanwhile becomes a DecodeError."""
    import av  # FFmpeg: a tenth of a second, which other sources need not wait for

    options = {"format_whitelist": DEMUXERS[kind]}
    try:
        with av.open(io.BytesIO(content), container_options=options, metadata_errors="ignore", mode="r") as container:
            streams = getattr(container.streams, kind)
            if not streams:
                raise DecodeError("no sound in it" if kind == "audio" else "no video in it")
            streams[0].codec_context.thread_count = 1
            yield container, streams[0]
    except (av.error.FFmpegError, EOFError, MemoryError, ValueError, IndexError) as error:
        raise DecodeError(one_line(error)) from error


def decode_audio(content: bytes, max_samples: int) -> tuple[npt.NDArray[np.generic], Fraction]:
    """Samples (T, channels) in the file's numbers, and their rate; DecodeError if damaged, cut off or too long."""
    with _open(content, "audio") as (container, stream):
        from av import AudioResampler

        # A damaged frame of FLAC is left out, and then samples are missing.
        stream.codec_context.options = {"err_detect": "crccheck+explode"}
        rate = stream.rate
        resampler = AudioResampler(_DTYPES.get(stream.format.packed.name, "fltp"))
        planes: list[npt.NDArray[np.generic]] = []
        num_values = 0
        for frame in chain.from_iterable(map(resampler.resample, chain(container.decode(stream), [None]))):
            planes.append(frame.to_ndarray())
            num_values += planes[-1].size
            if num_values > max_samples:
                raise DecodeError(f"more than {max_samples} samples")
        if not planes:
            raise DecodeError("no samples in it")
        values = np.concatenate(planes, axis=1).T
        if stream.duration is not None and stream.time_base is not None:
            announced = float(stream.duration * stream.time_base)
            if len(values) / rate < (FLAC_WHOLE if stream.codec_context.name == "flac" else WHOLE) * announced:
                raise DecodeError(f"ends after {len(values) / rate:.2f} of {announced:.2f} seconds")
    return values, Fraction(rate)


def places(num_there: int, num_wanted: int) -> list[int]:
    """Numbers of the frames to take: the middle ones of equal parts of a clip; DecodeError if there are not as many."""
    if num_there < num_wanted:
        raise DecodeError(f"{num_there} frames, and data.num_frames={num_wanted}")
    return [(2 * part + 1) * num_there // (2 * num_wanted) for part in range(num_wanted)]


def decode_video(content: bytes, num_frames: int, image_size: int) -> npt.NDArray[np.uint8]:
    """Decode frames, one after the other (image_size, image_size, T * 3): upright, RGB, scaled and centre-cropped.

    Frames are counted, not timed. How many there are is known for certain only when all have been decoded; mostly it is
    the number of packets, which is quick to count. DecodeError if it is not a video, is damaged, cut off or too short.
    """
    if not content:
        raise DecodeError("empty file")
    with _open(content, "video") as (container, stream):
        if stream.width * stream.height > MAX_PIXELS:
            raise DecodeError(f"{stream.width} x {stream.height} pixels; more than {MAX_PIXELS} look like a bomb")
        expected = sum(packet.size > 0 for packet in container.demux(stream))
    frames, num_there = _take_frames(content, places(max(expected, num_frames), num_frames), image_size)
    if num_there != expected or num_there < num_frames:
        frames, _ = _take_frames(content, places(num_there, num_frames), image_size)
    return np.concatenate(frames, axis=2)


def _take_frames(content: bytes, chosen: Sequence[int], image_size: int) -> tuple[list[npt.NDArray[np.uint8]], int]:
    frames, number, last = [], 0, None
    with _open(content, "video") as (container, stream):
        for number, last in enumerate(container.decode(stream), start=1):
            if last.is_corrupt:
                raise DecodeError("a damaged frame")
            if number - 1 in chosen:
                turns = round(last.rotation / _QUARTER_TURN) % 4
                pixels_HWC = np.rot90(last.to_ndarray(format="rgb24"), turns)
                frames.append(resize(np.ascontiguousarray(pixels_HWC), image_size))
        _check_whole(container, stream, number, last)
    return frames, number


def _check_whole(container: Any, stream: Any, number: int, last: Any) -> None:
    """Refuse a file that was cut off, as far as its header shows: some have no count, or the length of the sound."""
    if number < WHOLE * stream.frames:
        raise DecodeError(f"ends after {number} of {stream.frames} frames")
    is_alone = len(container.streams) == 1 and stream.frames == 0
    if not is_alone or container.duration is None or last is None or last.time is None:
        return
    seconds, started, rate = container.duration / 1e6, (container.start_time or 0) / 1e6, stream.average_rate
    ends = last.time - started + (1 / float(rate) if rate else 0.0)
    if ends < WHOLE * seconds:
        raise DecodeError(f"ends after {ends:.2f} of {seconds:.2f} seconds")
