"""Records of data and weights: reads, prepared sets, pretrained weights, trained models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, PositiveInt

from paceline.conf.data import NUM_COLOURS, Signal
from paceline.conf.execution import Precision
from paceline.conf.model import Model
from paceline.conf.plugins import EMBEDDED_MODELS, NetworkFacts, Plugin
from paceline.tasks.records.record import Record

PARTITIONS = "partitions"
"""Folder of a prepared set with what a user's DataModule has prepared."""


class Pretrained(Record):
    """Pretrained weights that fit the network."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    reference: str  # as the configuration names them
    path: str  # where all ranks see them
    sha256: str  # of the file
    num_tensors: int  # that the network takes from it
    reinitialized: tuple[str, ...] = Field(default=(), alias="anew")  # set by the seed, as a head for other classes

    @property
    def summary(self) -> str:
        """One line."""
        seeded = f"; by the seed: {', '.join(self.reinitialized)}" if self.reinitialized else ""
        return f"{self.num_tensors} tensors of {self.reference} (sha256 {self.sha256[:12]}){seeded}"


class Reads(Record):
    """Reads from remote storage."""

    num_fetched: int = 0  # objects that came from the store
    num_bytes: int = 0  # of those
    num_cached: int = 0  # objects that were in the cache of a worker's host
    num_retries: int = 0  # requests that were sent again
    num_damaged: int = 0  # objects in a cache that were not what had been put there; fetched again

    @classmethod
    def total(cls, reads: Iterable[Reads]) -> Reads:
        """Sum of all records."""
        counts: Counter[str] = Counter()
        for record in reads:
            counts.update(record.model_dump())
        return cls(**counts)

    @property
    def summary(self) -> str:
        """One line; empty without remote reads."""
        if not self.num_fetched + self.num_cached:
            return ""
        retries = f", {self.num_retries:,} requests sent again" if self.num_retries else ""
        damaged = f", {self.num_damaged:,} damaged ones in the cache" if self.num_damaged else ""
        return (
            f"{self.num_fetched:,} objects ({self.num_bytes / 1e6:,.1f} MB) fetched, "
            f"{self.num_cached:,} in the cache{retries}{damaged}"
        )

    @property
    def metrics(self) -> dict[str, float | None]:
        """By name in MLflow; empty without remote reads."""
        return {f"data/{name}": value for name, value in self.model_dump().items()} if self.summary else {}


class PreparedSet(Record):
    """A prepared set on disk; the facts of its manifest."""

    path: str
    key: str  # sha256 of the preparation's inputs; the set is reused while it stays the same
    fingerprint: str  # 8 hex digits over the content (every shard's sha256, class names), equal on any machine
    image_shape: tuple[int, int, int]  # height, width, channels, masks among them, of an image as it is learned
    stored_size: int | None = None  # shorter side in pixels, aspect ratio unchanged; None for squares of `image_shape`
    storage: Literal["raw", "jpeg"] = "raw"  # form of stored images
    class_names: tuple[str, ...]
    target_names: tuple[str, ...] = ()  # names of regression targets, such as ("angle",)
    num_planes: int = 0  # of the channels, the last so many are masks: 0 for no class, 1 and up for the classes
    num_train: int
    num_validation: int
    num_test: int
    num_rejected: int
    ignored: dict[str, int] = Field(default_factory=dict)
    class_counts: dict[str, tuple[int, ...]]  # samples per class for each split; pixels, where these have one
    mean: tuple[float, ...]  # per-channel mean of the training split in units of full scale (0 to 1)
    std: tuple[float, ...]  # per-channel standard deviation of the training split in units of full scale
    num_bytes: int
    reused: bool
    seconds: float  # wall time of this call; of looking the set up when it was reused
    reads: Reads = Reads()  # remote reads of this call

    @property
    def has_squares(self) -> bool:
        """Whether images are stored as squares of pixels, or else as photographs."""
        return self.storage == "raw" and self.stored_size is None

    @property
    def picture_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of what a network sees."""
        height, width, channels = self.image_shape
        return height, width, channels - self.num_planes

    def normalised_for(self, network: NetworkFacts) -> Self:
        """The set with the mean and the deviation that a network was published with, if it has as many channels."""
        if not network.image_mean or len(network.image_mean) != len(self.mean):
            return self
        return self.model_copy(update={"mean": network.image_mean, "std": network.image_std})


class PreparedPartitions(Record):
    """Data on disk that the user's DataModule prepared, partition by partition."""

    path: str  # of the set; its folder `PARTITIONS` has a folder for each partition
    key: str  # sha256 of the class, its arguments, its code and its partitions
    fingerprint: str  # 8 hex digits over the content
    num_partitions: int
    num_files: int
    num_bytes: int
    reused: bool
    seconds: float  # wall time of this call

    @property
    def directory(self) -> Path:
        """The directory that the DataModule gets."""
        return Path(self.path) / PARTITIONS


class ModuleFacts(Record):
    """Description of a trained model of own Lightning code: everything needed to instantiate it and its data."""

    settings: dict[str, Any]  # configuration as LightningCLI reads it, without credentials
    packages: tuple[str, ...]  # of its classes, with versions and digests of their files
    precision: Precision  # of its training
    weights_sha256: str  # of the file of weights


class ModelFacts(Record):
    """Description of a trained model: everything needed to build its network and to feed it."""

    model: Model
    image_shape: tuple[PositiveInt, PositiveInt, PositiveInt]  # height, width, channels
    class_names: tuple[str, ...]
    target_names: tuple[str, ...] = ()
    mean: tuple[float, ...]  # per channel, in units of full scale, as in `PreparedSet`
    std: tuple[float, ...]
    fingerprint: str  # of the prepared set that it was trained on
    weights_sha256: str  # of the file of weights
    package: Plugin | None = None  # the user's package that offered the model then; None for one of Paceline's
    signal: Signal | None = None  # how signals became the pictures of its training; None for what was pictures already
    fit: Literal["crop"] | None = None  # how images came to their size; None for the usual way, which is to scale them

    @property
    def num_frames(self) -> int:
        """Frames of its clips; 0 for a model of images."""
        takes_clips = EMBEDDED_MODELS.get(self.model.name, NetworkFacts()).takes_clips
        return self.image_shape[2] // NUM_COLOURS if takes_clips else 0
