"""Decodes some frames of a video file, in one thread, because many workers decode at the same time."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paceline.tasks.data.decode.transform import MAX_PIXELS, DecodeError, resize
from paceline.tasks.errors import one_line

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.stream import VideoStream

DEMUXERS = "mov,avi,matroska,mpeg,mpegvideo,mpegts,flv,asf,ogg,gif"
"""FFmpeg's names of what is read. Others are refused: playlists, for one, open files and addresses that they name."""
WHOLE = 0.9  # a file with less than this share of the length in its header was cut off
_QUARTER_TURN = 90


def places(num_there: int, num_wanted: int) -> list[int]:
    """Numbers of the frames to take: the middle ones of equal parts of a clip; DecodeError if there are not as many."""
    if num_there < num_wanted:
        raise DecodeError(f"{num_there} frames, and data.num_frames={num_wanted}")
    return [(2 * part + 1) * num_there // (2 * num_wanted) for part in range(num_wanted)]


def decode(content: bytes, num_frames: int, image_size: int) -> npt.NDArray[np.uint8]:
    """Decode frames of a video: upright, RGB, scaled and centre-cropped.

    Frames are counted, not timed. How many there are is known for certain only when all have been decoded; mostly it is
    the number of packets, which is quick to count.

    Returns:
        Pixels (image_size, image_size, T * 3), one frame after the other.

    Raises:
        DecodeError: The file is not a video, is damaged, cut off or too short.
    """
    import av  # FFmpeg: a tenth of a second, which other sources need not wait for

    if not content:
        raise DecodeError("empty file")
    try:
        container, stream = _open(content)
        with container:
            expected = sum(packet.size > 0 for packet in container.demux(stream))
        frames, num_there = _take_frames(content, places(max(expected, num_frames), num_frames), image_size)
        if num_there != expected or num_there < num_frames:
            frames, _ = _take_frames(content, places(num_there, num_frames), image_size)
    except DecodeError:
        raise
    except (av.error.FFmpegError, EOFError, MemoryError, ValueError, IndexError) as error:
        raise DecodeError(one_line(error)) from error
    return np.concatenate(frames, axis=2)


def _open(content: bytes) -> tuple[InputContainer, VideoStream]:
    import av

    container = av.open(
        io.BytesIO(content), container_options={"format_whitelist": DEMUXERS}, metadata_errors="ignore", mode="r"
    )
    if not container.streams.video:
        container.close()
        raise DecodeError("no video in it")
    stream = container.streams.video[0]
    if stream.width * stream.height > MAX_PIXELS:
        container.close()
        raise DecodeError(f"{stream.width} x {stream.height} pixels; more than {MAX_PIXELS} look like a bomb")
    stream.codec_context.thread_count = 1
    return container, stream


def _take_frames(content: bytes, chosen: Sequence[int], image_size: int) -> tuple[list[npt.NDArray[np.uint8]], int]:
    container, stream = _open(content)
    frames, number, last = [], 0, None
    with container:
        for number, last in enumerate(container.decode(stream), start=1):
            if last.is_corrupt:
                raise DecodeError("a damaged frame")
            if number - 1 in chosen:
                turns = round(last.rotation / _QUARTER_TURN) % 4
                pixels_HWC = np.rot90(last.to_ndarray(format="rgb24"), turns)
                frames.append(resize(np.ascontiguousarray(pixels_HWC), image_size))
        _check_whole(container, stream, number, last)
    return frames, number


def _check_whole(container: InputContainer, stream: VideoStream, number: int, last: Any) -> None:
    """Refuse a file that was cut off, as far as its header shows: some have no count, or the length of the sound."""
    if number < WHOLE * stream.frames:
        raise DecodeError(f"ends after {number} of {stream.frames} frames")
    is_alone = len(container.streams) == 1 and stream.frames == 0
    if not is_alone or container.duration is None or last is None or last.time is None:
        return
    seconds = container.duration / 1e6
    started = (container.start_time or 0) / 1e6
    rate = stream.average_rate
    ends = last.time - started + (1 / float(rate) if rate else 0.0)
    if ends < WHOLE * seconds:
        raise DecodeError(f"ends after {ends:.2f} of {seconds:.2f} seconds")
