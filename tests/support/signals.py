"""Folders of real signal files, made for a test: two classes told apart by their pitch."""

import io

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from scipy.io import wavfile

RATE = 16_000
CODECS = {"flac": "flac", "mp3": "libmp3lame", "ogg": "vorbis", "opus": "libopus"}


def sine(frequency, rate=RATE, seconds=1.0, amplitude=0.5):
    return amplitude * np.sin(2 * np.pi * frequency * np.arange(round(rate * seconds)) / rate)


def wav(samples, rate=RATE, dtype=np.int16):
    """A WAV file; integers are left-justified, as 24 bits in 32 are."""
    scaled = samples if np.dtype(dtype).kind == "f" else np.round(samples * (np.iinfo(dtype).max + 1.0))
    buffer = io.BytesIO()
    wavfile.write(buffer, rate, scaled.astype(dtype))
    return buffer.getvalue()


def encode(samples, form, rate=RATE, layout="mono"):
    """A file of one format; samples (T), or (T, channels)."""
    buffer = io.BytesIO()
    if form == "ogg" and samples.ndim == 1:  # FFmpeg's own encoder has two channels
        samples, layout = np.column_stack([samples, samples]), "stereo"
    with av.open(buffer, "w", format=form) as container:
        options = {"strict": "experimental"} if form == "ogg" else {}
        stream = container.add_stream(CODECS[form], rate=rate, layout=layout, options=options)
        kind = "s16" if form == "flac" else "fltp"
        values = np.atleast_2d(samples.T)
        if kind == "s16":
            values = np.round(values * 2**15).astype(np.int16).T.reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(
            np.ascontiguousarray(values.astype(values.dtype if kind == "s16" else np.float32)), kind, layout
        )
        frame.sample_rate = rate
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            container.mux(packet)
    return buffer.getvalue()


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def parquet(**columns):
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer)
    return buffer.getvalue()


def make_sounds(root, per_class=24, seed=5):
    """Folders `high` and `low` with every kind of file in turn; the names of the damaged."""
    rng, damaged = np.random.default_rng(seed), set()
    for name, (low, high) in {"low": (300, 500), "high": (3_000, 3_500)}.items():
        (root / name).mkdir(parents=True)
        for number in range(per_class):
            samples = sine(rng.uniform(low, high), seconds=rng.uniform(0.7, 1.4))
            samples += rng.normal(0, 0.1, len(samples))
            kind = ("wav", "npy", "parquet")[number % 3]
            content = {"wav": wav, "npy": npy, "parquet": lambda it: parquet(signal=it)}[kind](samples)
            if number in (6, 7, 8):  # one of each kind
                content = content[: len(content) // 2]
                damaged.add(f"{name}/{number:03d}.{kind}")
            (root / name / f"{number:03d}.{kind}").write_bytes(content)
    return damaged
