"""Decodes FLAC, MP3 and Ogg (Vorbis, Opus, FLAC) to samples, in one thread: many workers decode at the same time."""

import io
from fractions import Fraction
from itertools import chain

import numpy as np
import numpy.typing as npt

from paceline.tasks.data.decode.transform import DecodeError
from paceline.tasks.errors import one_line

DEMUXERS = "flac,mp3,ogg"  # FFmpeg's names; others are refused, because playlists open what they name
INTACT = {"flac": 1.0}  # a file with less than this share of the length in its header is damaged or was cut off
LOSSY_INTACT = 0.9  # of other codecs, whose headers may be estimates
_HEADS = (b"fLaC", b"OggS", b"ID3")
_SYNC = 0xFFE0  # first 11 bits of a frame of MP3
_DTYPES = {"u8": "u8p", "s16": "s16p", "s32": "s32p"}  # kinds of integers, in planes; others become float32


def is_audio(content: bytes) -> bool:
    """Whether the first bytes are those of one of these formats."""
    return content.startswith(_HEADS) or int.from_bytes(content[:2]) & _SYNC == _SYNC


def decode(content: bytes, max_samples: int) -> tuple[npt.NDArray[np.generic], Fraction]:
    """Samples (T, channels) in the file's own numbers, and how many there are in a second.

    Raises:
        DecodeError: It holds no sound, is damaged, cut off, or has more than `max_samples` values.
    """
    import av  # FFmpeg: a tenth of a second, which other sources need not wait for

    try:
        with av.open(
            io.BytesIO(content), container_options={"format_whitelist": DEMUXERS}, metadata_errors="ignore", mode="r"
        ) as container:
            if not container.streams.audio:
                raise DecodeError("no sound in it")
            stream = container.streams.audio[0]
            stream.codec_context.thread_count = 1
            # A damaged frame of FLAC is left out, and then samples are missing.
            stream.codec_context.options = {"err_detect": "crccheck+explode"}
            rate = stream.rate
            resampler = av.AudioResampler(_DTYPES.get(stream.format.packed.name, "fltp"))
            planes: list[npt.NDArray[np.generic]] = []
            num_values = 0
            frames = (resampler.resample(frame) for frame in chain(container.decode(stream), [None]))
            for frame in chain.from_iterable(frames):
                planes.append(frame.to_ndarray())
                num_values += planes[-1].size
                if num_values > max_samples:
                    raise DecodeError(f"more than {max_samples} samples")
            if not planes:
                raise DecodeError("no samples in it")
            values = np.concatenate(planes, axis=1).T
            if stream.duration is not None and stream.time_base is not None:
                announced = float(stream.duration * stream.time_base)
                if len(values) / rate < INTACT.get(stream.codec_context.name, LOSSY_INTACT) * announced:
                    raise DecodeError(f"ends after {len(values) / rate:.2f} of {announced:.2f} seconds")
    except DecodeError:
        raise
    except (av.error.FFmpegError, EOFError, MemoryError, ValueError, IndexError) as error:
        raise DecodeError(one_line(error)) from error
    return values, Fraction(rate)
