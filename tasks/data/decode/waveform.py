"""Decodes a WAV, FLAC, MP3, Ogg, NumPy or Parquet file to one signal in time; its first bytes decide on the format."""

import io
import warnings
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from scipy.io import wavfile

from paceline.tasks.data.decode import media
from paceline.tasks.data.decode.transform import DecodeError
from paceline.tasks.errors import one_line

MAX_SAMPLES = 2**27  # largest number of values of a file: a gibibyte as float64
MAX_RATE = 10_000_000
TIME = "time"  # column of a Parquet file with the times of its samples
JITTER = 0.5  # largest deviation of a time from equal steps, in steps
RATE_ERROR = Fraction(1, 1_000)  # largest relative error when the rate of a time column is rounded: one of 1,000 bands
_WAV = (b"RIFF", b"RIFX", b"RF64")
_NUMPY, _PARQUET = b"\x93NUMPY", b"PAR1"
_COMPRESSED = (b"fLaC", b"OggS", b"ID3")
_SYNC = 0xFFE0  # first 11 bits of a frame of MP3

Floats = npt.NDArray[np.float64]
Rate = int | Fraction


def decode(content: bytes, default_rate: int) -> tuple[Floats, Rate]:
    """Samples (T) of a file and how many there are in a second, which need not be a whole number.

    They are the mean of its channels, where integers have an amplitude of 1 at their full scale. Files without a rate
    have `default_rate`. DecodeError if it is empty, damaged, of another kind, or holds no numbers in time.
    """
    if not content:
        raise DecodeError("empty file")
    try:
        values, rate = _read(content, default_rate)
    except DecodeError:
        raise
    except Exception as error:  # what readers raise on hostile bytes is anything, struct.error and MemoryError included
        raise DecodeError(one_line(error)) from error
    if values.ndim not in (1, 2) or values.dtype.kind not in "iuf":
        raise DecodeError(
            f"an array {values.shape} of {values.dtype}; numbers (samples) or (samples, channels) are needed"
        )
    if not 0 < values.size <= MAX_SAMPLES:
        raise DecodeError(f"{values.size} samples; from 1 to {MAX_SAMPLES} are understood")
    samples_T = values.astype(np.float64)
    if values.dtype.kind != "f":
        half = 2.0 ** (8 * values.dtype.itemsize - 1)
        samples_T = (samples_T - (half if values.dtype.kind == "u" else 0.0)) / half
    if samples_T.ndim > 1:
        samples_T = samples_T.mean(axis=1)
    if not 1 <= rate <= MAX_RATE:
        raise DecodeError(f"{float(rate):.10g} samples per second; from 1 to {MAX_RATE} is understood")
    if not np.isfinite(samples_T).all():
        raise DecodeError("a sample is not a finite number")
    return samples_T, rate


def _read(content: bytes, default_rate: int) -> tuple[npt.NDArray[np.generic], Rate]:
    if content.startswith(_WAV):
        with warnings.catch_warnings():
            # Chunks that are not sound do not matter; a sound that ends too early does.
            warnings.simplefilter("ignore", wavfile.WavFileWarning)
            warnings.filterwarnings("error", message="Reached EOF prematurely", category=wavfile.WavFileWarning)
            rate, samples = wavfile.read(io.BytesIO(content))
        return samples, rate
    if content.startswith(_NUMPY):
        return np.load(io.BytesIO(content), allow_pickle=False), default_rate
    if content.startswith(_COMPRESSED) or int.from_bytes(content[:2]) & _SYNC == _SYNC:
        return media.decode_audio(content, MAX_SAMPLES)
    if not content.startswith(_PARQUET):
        raise DecodeError("neither a WAV nor a NumPy nor a Parquet file, nor FLAC, MP3 or Ogg")
    # A row for each sample, a column for each channel, and perhaps one with their times.
    file = pq.ParquetFile(io.BytesIO(content))
    if file.metadata.num_rows * file.metadata.num_columns > MAX_SAMPLES:
        raise DecodeError(f"{file.metadata.num_rows} rows; up to {MAX_SAMPLES} samples are understood")
    table = file.read()
    channels = [name for name in table.column_names if name != TIME]
    if not channels:
        raise DecodeError(f"no column of samples besides {TIME}")
    rate = _rate(table[TIME]) if TIME in table.column_names else default_rate
    for name in channels:
        column = table[name]
        if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
            raise DecodeError(f"column {name} holds {column.type}; samples are numbers, and their times are in {TIME}")
        if column.null_count:
            raise DecodeError(f"column {name} lacks {column.null_count} of {len(column)} samples")
    columns = [np.asarray(table[name].to_numpy()) for name in channels]
    return columns[0] if len(columns) == 1 else np.column_stack(columns), rate


def _rate(column: pa.ChunkedArray) -> Fraction:
    """Samples per second, from times that are timestamps, or seconds as numbers."""
    if column.null_count or len(column) < 2:  # noqa: PLR2004
        raise DecodeError(f"{TIME} needs two times or more, one for each sample")
    times = column.to_numpy()
    if times.dtype.kind in "mM":
        seconds = (times - times[0]) / np.timedelta64(1, "s")
    else:
        seconds = times.astype(np.float64) - float(times[0])
    step = seconds[-1] / (len(seconds) - 1)
    if not step > 0 or np.abs(seconds - step * np.arange(len(seconds))).max() > JITTER * step:
        raise DecodeError(f"{TIME} does not have equal steps; give one sample after each {step:.6g} s")
    # A whole number where that is as good as a rate, or a fraction of small numbers: by these it is resampled.
    exact = Fraction(1 / float(step))
    near = (exact.limit_denominator(10**digits) for digits in range(4))
    return next((fraction for fraction in near if abs(fraction - exact) <= RATE_ERROR * exact), exact)
