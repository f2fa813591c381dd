"""The settings of time-frequency images: how a signal becomes a picture, in hertz, milliseconds and decibels."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from paceline.conf.section import Section

MAX_CLIP_SAMPLES = 2**24  # of one clip: 128 MiB while it is turned into a picture
MIN_WINDOW_SAMPLES = 4


class Signal(Section):
    """How a signal becomes a picture: time from left to right, frequency from the bottom to the top."""

    kind: Literal["log_mel", "stft"] = "log_mel"
    """Rows of the picture: `log_mel`: triangular bands of equal width in mel; `stft`: bands of equal width in hertz.
    Each holds the power in its band in decibels, where a sine of amplitude 1 (full scale of a WAV file) has 0."""
    sample_rate: Annotated[int, Field(ge=1, le=10_000_000)] = 16_000
    """Samples per second, hertz, to which files of another rate are resampled; half of it is the highest frequency.
    NumPy files say no rate and are taken to have this one, and so are Parquet files without a column `time`."""
    clip_seconds: Annotated[float, Field(gt=0)] = 1.0
    """Part of a file that becomes a picture, seconds: the middle of longer files; shorter files get silence
    around them."""
    window_ms: Annotated[float, Field(gt=0)] = 32.0
    """Length of each Hann window, milliseconds; frequencies closer than twice its inverse merge."""
    hop_ms: Annotated[float, Field(gt=0)] | None = None
    """Distance from one window to the next, milliseconds, at most a window; null: half a window, or less where a clip
    needs that for a window to each column of the picture. More windows than columns are averaged as power."""
    num_bands: Annotated[int, Field(ge=2, le=1024)] | None = None
    """Bands from 0 to half of the sample rate; null for one to each row of the picture."""
    dynamic_range_db: Annotated[float, Field(gt=0, le=300)] = 80.0
    """From black to white, decibels. A picture has 256 greys: with 80 decibels, a step is 0.31 decibels."""
    top_db: Annotated[float, Field(ge=-300, le=300)] | None = None
    """Level that becomes white, decibels of a sine of amplitude 1; null for the loudest spot of each
    clip, however loud."""

    @property
    def clip_samples(self) -> int:
        """Samples of a clip."""
        return round(self.clip_seconds * self.sample_rate)

    @property
    def window_samples(self) -> int:
        """Samples of a window."""
        return round(self.window_ms * self.sample_rate / 1_000)

    @property
    def axes(self) -> str:
        """What a picture has from left to right, from bottom to top, and from black to white, in words."""
        top = "the loudest" if self.top_db is None else f"{self.top_db:g} dB"
        scale = "mel" if self.kind == "log_mel" else "linear"
        frequencies = f"0 to {self.sample_rate / 2:,g} Hz upwards ({scale})"
        return f"{self.clip_seconds:g} s across, {frequencies}, {self.dynamic_range_db:g} dB below {top}"

    def hop_samples(self, num_columns: int) -> int:
        """Samples from one window to the next, in a picture of so many columns."""
        if self.hop_ms is not None:
            return round(self.hop_ms * self.sample_rate / 1_000)
        return min(self.window_samples // 2, (self.clip_samples - self.window_samples) // (num_columns - 1))

    def check_size(self, num_columns: int) -> None:
        """Raise ValueError if a clip has too few windows for the columns of a picture, or too many bands."""
        if self.num_bands is not None and self.num_bands > num_columns:
            raise ValueError(
                f"data.signal.num_bands={self.num_bands} exceeds the {num_columns} rows of data.image_size; "
                "use fewer bands or larger images"
            )
        hop = self.hop_samples(num_columns)
        if hop < 1 or (self.clip_samples - self.window_samples) // hop + 1 < num_columns:
            raise ValueError(
                f"data.image_size={num_columns} needs as many windows, and a clip of {self.clip_samples} samples has "
                f"only {(self.clip_samples - self.window_samples) // max(hop, 1) + 1} of {self.window_samples}, one "
                f"every {max(hop, 1)}; use a smaller image_size, window_ms or hop_ms, or a larger clip_seconds"
            )

    @model_validator(mode="after")
    def _lengths_fit(self) -> Self:
        clip, window = self.clip_samples, self.window_samples
        if clip > MAX_CLIP_SAMPLES:
            raise ValueError(
                f"data.signal.clip_seconds={self.clip_seconds:g} are {clip} samples at sample_rate={self.sample_rate}; "
                f"use at most {MAX_CLIP_SAMPLES}"
            )
        if not MIN_WINDOW_SAMPLES <= window <= clip:
            raise ValueError(
                f"data.signal.window_ms={self.window_ms:g} is {window} samples at sample_rate={self.sample_rate}; "
                f"use {MIN_WINDOW_SAMPLES} to {clip} samples"
            )
        if self.hop_ms is not None and not 1 <= self.hop_samples(2) <= window:
            raise ValueError(
                f"data.signal.hop_ms={self.hop_ms:g} is {self.hop_samples(2)} samples; windows of {window} samples "
                f"cannot be so far apart; use a hop of 1 to {window} samples"
            )
        return self
