"""The settings of the data: source, location, how samples become images of one size, and signals pictures."""

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from paceline.conf import plugins
from paceline.conf.plugins import EMBEDDED_SOURCES, Plugin, Source
from paceline.conf.section import Fraction, OwnName, Section, Text

SIGNAL_SOURCES = frozenset(name for name, source in EMBEDDED_SOURCES.items() if source.has_signals)
NUM_COLOURS = 3  # channels of a frame of a clip, of grey ones too
NUM_FRAMES, MAX_FRAMES = 8, 64  # frames of a clip: the default and the largest number
CLIP_SOURCES = frozenset(name for name, source in EMBEDDED_SOURCES.items() if source.facts.has_clips)
"""Sources whose samples are clips; all frames of a clip are the channels of one image."""
ONE_SIZE_SOURCES = frozenset({"cifar10", "arrays"})  # their images have one size, which is seldom above `image_size`
STORED_MARGIN = 1.15  # 256 pixels for crops of 224, as ImageNet's images are scaled since Krizhevsky et al. (2012)
MIN_CLASSES = 2
DRAWN_SOURCES = frozenset(name for name, source in EMBEDDED_SOURCES.items() if source.is_drawn)
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
            fault = f"data.signal.num_bands={self.num_bands} exceeds the {num_columns} rows of data.image_size"
            raise ValueError(f"{fault}; use fewer bands or larger images")
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
            fault = f"data.signal.window_ms={self.window_ms:g} is {window} samples at sample_rate={self.sample_rate}"
            raise ValueError(f"{fault}; use {MIN_WINDOW_SAMPLES} to {clip} samples")
        if self.hop_ms is not None and not 1 <= self.hop_samples(2) <= window:
            raise ValueError(
                f"data.signal.hop_ms={self.hop_ms:g} is {self.hop_samples(2)} samples; windows of {window} samples "
                f"cannot be so far apart; use a hop of 1 to {window} samples"
            )
        return self


class Data(Section):
    """What is learned from."""

    source: Annotated[
        Source | OwnName,
        Field(
            description="Kind of data. "
            + ". ".join(f"`{name}`: {source.help}" for name, source in EMBEDDED_SOURCES.items())
            + ". Or the name of a source that an installed package offers."
        ),
    ] = "digits"
    root: Text | None = None
    """Location of the data: a path or any URL that fsspec reads. Not used by the embedded sources."""
    image_size: Annotated[int, Field(ge=8, le=1024)] = 28
    """Height and width of a prepared image, pixels."""
    fit: Literal["scale", "crop"] = "scale"
    """How images of other sizes get `image_size`. `scale`: the shorter side is scaled, and the middle is cropped;
    `crop`: the middle is cropped without scaling, for images where the size of things or the grain of noise matters.
    Images that are too small for that are rejected."""
    stored_size: Annotated[int, Field(ge=8, le=4096)] | Literal["auto"] = "auto"
    """Shorter side of a stored image, pixels. Above `image_size`, images keep their aspect ratio, random crops
    (`recipe.vary.crop_scale`) take their pixels from the complete image, and evaluation scales the middle. `auto`:
    1.15 times `image_size`, or more for small crops, where photographs are cropped; else `image_size`."""
    storage: Literal["auto", "raw", "jpeg"] = "auto"
    """Form of stored images. `raw`: pixels; `jpeg`: each image is encoded once and decoded in each epoch, which takes
    about a tenth of the space; `auto`: `jpeg` where the pixels exceed a quarter of the host's memory and the host
    decodes fast enough."""
    trust_directory_times: bool = False
    """Reuse the listing of local folders in which no name has changed since the last run, by their modification times;
    a file that was overwritten in place is then not noticed. For many files on a slow file system."""
    jpeg_quality: Annotated[int, Field(ge=50, le=100)] = 90
    """Quality of `storage=jpeg`, in steps of libjpeg."""
    num_frames: Annotated[int, Field(ge=2, le=MAX_FRAMES)] = NUM_FRAMES
    """Frames of a prepared clip, of `clips` and `motions`: the clip is divided into so many equal
    parts, and the middle frame of each part is used. Clips with fewer frames are rejected."""
    test_fraction: Fraction = 0.2
    """Share of each class that is held out for the test split where the source has no test split of its own."""
    validation_fraction: Fraction = 0.1
    """Share of each class of the training split that is held out for validation after each epoch; 0 for none."""
    classes: tuple[Text, ...] | None = None
    """Classes that are learned, by their names; the others' samples are left out. Quote numbers: ['0','1']. null for
    all."""
    max_rejected_fraction: Fraction = 0.01
    """Largest tolerated share of samples that cannot be decoded; above it the run stops with their list."""
    signal: Signal = Signal()
    """How signals become pictures; used by `signals` and `tones`."""

    @property
    def used_signal(self) -> Signal | None:
        """How signals become pictures; null for a source of pictures."""
        return self.signal if self.source in SIGNAL_SOURCES else None

    @model_validator(mode="after")
    def _samples_fit(self) -> Self:
        if self.source in SIGNAL_SOURCES:
            self.signal.check_size(self.image_size)
        elif self.signal != Signal():
            fault = f"data.signal cannot be used with data.source={self.source}, whose samples are images"
            raise ValueError(f"{fault}; remove the settings data.signal.* or choose data.source=signals")
        if self.fit != "scale" and not self.has_sizes:
            fault = f"data.fit={self.fit} cannot be used with data.source={self.source}, whose images all have one size"
            raise ValueError(f"{fault}; remove data.fit")
        if self.num_frames != NUM_FRAMES and self.source not in CLIP_SOURCES:
            raise ValueError(
                f"data.num_frames={self.num_frames} cannot be used with data.source={self.source}, whose samples "
                "are not clips; remove data.num_frames or choose data.source=clips"
            )
        return self

    @model_validator(mode="after")
    def _storage_fits(self) -> Self:
        stored, side = self.stored_size, self.image_size
        if stored != "auto" and stored < side:
            raise ValueError(
                f"data.stored_size={stored} is below data.image_size={side}, and images are not enlarged when they "
                f"are loaded; use data.stored_size={side} or more"
            )
        if self.keeps_aspect and not self.are_photographs:
            raise ValueError(
                f"data.stored_size={stored} cannot be used with data.source={self.source} and data.fit={self.fit}; "
                "it is for images of classes that are scaled; remove data.stored_size"
            )
        if self.storage == "jpeg" and not self.allows_jpeg:
            raise ValueError(
                f"data.storage=jpeg cannot be used with data.source={self.source}: encoding changes masks, angles, "
                "signals and clips; use data.storage=raw"
            )
        return self

    @property
    def stored_side(self) -> int:
        """Shorter side of a stored image, pixels."""
        return self.image_size if self.stored_size == "auto" else self.stored_size

    @property
    def keeps_aspect(self) -> bool:
        """Whether stored images keep their aspect ratio; otherwise they are squares of `image_size`."""
        return self.stored_side > self.image_size

    @property
    def allows_jpeg(self) -> bool:
        """Whether its samples are images and nothing else, as far as that is known without the user's package."""
        if self.source not in EMBEDDED_SOURCES:
            return True
        facts = plugins.source_facts(self.source)
        return self.source not in SIGNAL_SOURCES and not (facts.has_masks or facts.has_clips or facts.target_names)

    @property
    def are_photographs(self) -> bool:
        """Whether its images may be larger than `image_size`, and are scaled to it."""
        return self.has_sizes and self.allows_jpeg and self.fit == "scale"

    def stored_for(self, crop_scale: tuple[float, float] | None) -> tuple[int, str]:
        """The stored size for random crops (smallest and largest share of the area), pixels, and the reason."""
        side = self.image_size
        if self.stored_size != "auto":
            return self.stored_size, "set by data.stored_size"
        if crop_scale is None:
            return side, "without random crops (recipe.vary.crop_scale), an image is its scaled middle"
        if not self.are_photographs or self.source in ONE_SIZE_SOURCES:
            return side, f"the images of data.source={self.source} are not photographs that are scaled"
        margin = max(STORED_MARGIN, crop_scale[1] ** -0.5)  # the largest crop of a square has image_size pixels a side
        return math.ceil(side * margin), f"{margin:.2f} x data.image_size, so that random crops use real pixels"

    @property
    def num_channels(self) -> int:
        """Of a prepared picture, its mask included: the colours of all its frames, where it is a clip."""
        facts = plugins.source_facts(self.source)
        return (facts.channels + facts.has_masks) * (self.num_frames if facts.has_clips else 1)

    @property
    def has_sizes(self) -> bool:
        """Whether its samples are images of their own sizes."""
        return self.source not in SIGNAL_SOURCES | CLIP_SOURCES | DRAWN_SOURCES

    @property
    def plugin(self) -> Plugin | None:
        """The user's package that offers the source; null for one of Paceline's."""
        return None if self.source in EMBEDDED_SOURCES else plugins.find("source", self.source)

    @model_validator(mode="after")
    def _classes_and_root_fit(self) -> Self:
        given = self.classes
        if given is not None and (len(set(given)) < len(given) or len(given) < MIN_CLASSES):
            fault = f"data.classes=[{','.join(given)}] must be {MIN_CLASSES} or more different classes"
            raise ValueError(f"{fault}; name each class once")
        if given is not None and self.source in EMBEDDED_SOURCES and plugins.source_facts(self.source).has_masks:
            fault = f"data.classes cannot be used with data.source={self.source}, which has masks"
            raise ValueError(f"{fault}; remove data.classes")
        if self.source in EMBEDDED_SOURCES:
            self.check_root()
        return self

    def check_root(self) -> None:
        """Raise ValueError for a root that the source does not read."""
        if self.root is not None and not plugins.source_facts(self.source).needs_root:
            fault = f"data.root={self.root} cannot be used with data.source={self.source}, which reads no files"
            raise ValueError(f"{fault}; remove data.root or choose data.source=folder")
