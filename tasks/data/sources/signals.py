"""Class-named folders of signals in time, laid out as `folder` lays out images.

They are WAV, FLAC, MP3, Ogg, NumPy and Parquet files. A file is one sample.
The decoder is imported at the first sample, because SciPy's signals take a second or two.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.conf.data import Data, Signal
from paceline.tasks.data.decode.transform import DecodeError
from paceline.tasks.data.listing import SPLITS, Origin, SampleListing
from paceline.tasks.data.samples import Item, Samples
from paceline.tasks.data.sources import folder
from paceline.tasks.data.storage.read_files import files_of, read_files

AUDIO_SUFFIXES = (".flac", ".mp3", ".ogg", ".oga", ".opus")
SIGNALS = folder.Kind("signal", frozenset({".wav", ".wave", ".npy", ".parquet", *AUDIO_SUFFIXES}), "signals", 1)
SPECTROGRAM_VERSION = 2  # grows with every change of a spectrogram's pixels (`decode/{spectrogram,waveform}.py`)


def list_samples(data: Data) -> SampleListing:
    """List class-named folders."""
    return folder.list_samples(data, SIGNALS)


def libraries(listing: SampleListing) -> tuple[str, ...]:
    """Packages that decide on the pixels; PyAV only where a file needs it, so that the keys of other sets stay."""
    paths = chain.from_iterable(listing.split(split).paths for split in SPLITS)
    return ("scipy", "pyarrow", *(("av",) if any(folder.suffix_of(path) in AUDIO_SUFFIXES for path in paths) else ()))


def key(origin: Origin) -> dict[str, Any]:
    """Settings and version of the spectrograms."""
    assert origin.signal is not None
    return {"signal": origin.signal.model_dump(mode="json"), "spectrogram": SPECTROGRAM_VERSION}


def read(origin: Origin, samples: Samples, image_size: int) -> Iterator[Item]:
    """Draw the picture of each file."""
    assert origin.signal is not None
    for content in read_files(origin.root, files_of(samples)):
        try:
            yield Item(content if isinstance(content, OSError) else decode(content, origin.signal, image_size))
        except (DecodeError, MemoryError) as error:
            yield Item(error)


def decode(content: bytes, signal: Signal, image_size: int) -> npt.NDArray[np.uint8]:
    """The picture (image_size, image_size, 1) of a whole file; DecodeError if it holds no signal."""
    from paceline.tasks.data.decode import spectrogram, waveform

    samples_T, rate = waveform.decode(content, signal.sample_rate)
    return spectrogram.draw(samples_T, rate, signal, image_size)
