"""The manifest of a prepared set: its facts, its files and its fingerprint."""

import hashlib
import json
import platform
import socket
import stat
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, Self, TypeVar

from pydantic import AfterValidator, Field, NonNegativeInt, ValidationError, model_validator

from paceline.conf.data import MAX_FRAMES, NUM_COLOURS, Data
from paceline.tasks.data.key import FORMAT_VERSION, decisive_versions
from paceline.tasks.data.listing import SPLITS, SampleListing, SplitName
from paceline.tasks.data.prepare import moments
from paceline.tasks.data.prepare.shard import Shard, ShardFile, ShardRecord
from paceline.tasks.records.data import PARTITIONS, PreparedPartitions, PreparedSet
from paceline.tasks.records.record import Record

MANIFEST = "manifest.json"
REJECTED = "rejected.jsonl"
CIRCUMSTANCES = ("source", "root", "listing", "host", "created", "python")
"""Facts of a set's provenance that do not decide on its content; the others are versions."""
MAX_SIDE, MAX_CHANNELS = 1024, NUM_COLOURS * MAX_FRAMES
Side = Annotated[int, Field(ge=1, le=MAX_SIDE)]


class DamagedError(Exception):
    """A prepared set does not match its manifest; the message names the difference."""


class SetManifest(Record):
    """The facts of any prepared set; its files are those of its parts."""

    format_version: int
    key: str
    fingerprint: str
    provenance: dict[str, str]

    @property
    def files(self) -> Sequence["ShardFile | PartitionFile"]:
        """Every file of every part."""
        raise NotImplementedError

    def content(self) -> str:
        """The fingerprint of what is listed."""
        raise NotImplementedError


class Manifest(SetManifest):
    """The facts of a prepared set of images."""

    image_shape: tuple[Side, Side, Annotated[int, Field(ge=1, le=MAX_CHANNELS)]]
    stored_size: Annotated[int, Field(ge=1)] | None = None
    """Shorter side of images that keep their aspect ratio, pixels; None for squares of `image_shape`."""
    storage: Literal["raw", "jpeg"] = "raw"
    class_names: tuple[str, ...]
    target_names: tuple[str, ...]
    num_planes: Annotated[int, Field(ge=0, le=1)] = 0  # number of trailing channels that are masks
    ignored: dict[str, int]
    num_rejected: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    class_counts: dict[SplitName, tuple[int, ...]]  # samples of each class; pixels, where these have one
    shards: tuple[Shard, ...]  # ordered by split and number

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if not len(self.mean) == len(self.std) == self.image_shape[2]:
            raise ValueError(f"{len(self.mean)} means and {len(self.std)} deviations of {self.image_shape[2]} channels")
        for split in SPLITS:
            counts = self.class_counts.get(split, ())
            adds_up = self.num_planes or sum(counts) == self.num_samples(split)
            if len(counts) != len(self.class_names) or not adds_up:
                raise ValueError(f"the classes of {split} do not add up to its {self.num_samples(split)} samples")
        return self

    def of_split(self, split: SplitName) -> tuple[Shard, ...]:
        """The shards of one split that hold samples, in order."""
        return tuple(shard for shard in self.shards if shard.split == split and shard.files)

    def num_samples(self, split: SplitName) -> int:
        """Samples of one split."""
        return sum(shard.num_samples for shard in self.of_split(split))

    @property
    def files(self) -> tuple[ShardFile, ...]:
        """Every file of every shard."""
        return tuple(file for shard in self.shards for file in shard.files)

    def content(self) -> str:
        """The fingerprint of class names and shards."""
        return fingerprint(self.shards, self.class_names)

    def to_prepared_set(self, path: Path, *, reused: bool, seconds: float) -> PreparedSet:
        """The record that other stages get."""
        shared = PreparedSet.model_fields.keys() & Manifest.model_fields.keys()
        return PreparedSet(
            **{name: getattr(self, name) for name in shared - {"class_counts"}},
            path=str(path),
            num_train=self.num_samples("train"),
            num_validation=self.num_samples("validation"),
            num_test=self.num_samples("test"),
            class_counts={split: self.class_counts[split] for split in SPLITS},
            num_bytes=sum(file.num_bytes for file in self.files),
            reused=reused,
            seconds=seconds,
        )


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or path.parts[:1] != (PARTITIONS,) or ".." in path.parts:
        raise ValueError("leads out of the partitions")
    return name


class PartitionFile(Record):
    """A file that a DataModule wrote."""

    name: Annotated[str, AfterValidator(_inside)]
    num_bytes: NonNegativeInt
    sha256: str


class Partition(Record):
    """A part of the data that a DataModule prepared, in a folder of its own."""

    name: str
    files: tuple[PartitionFile, ...]


class PartitionsManifest(SetManifest):
    """The facts of data that a user's DataModule prepared."""

    partitions: tuple[Partition, ...]  # in alphabetical order

    @property
    def files(self) -> tuple[PartitionFile, ...]:
        """Every file of every partition."""
        return tuple(file for partition in self.partitions for file in partition.files)

    def content(self) -> str:
        """The fingerprint of the partitions."""
        return _digest([[file.name, file.sha256] for file in self.files])

    def to_prepared(self, path: Path, *, reused: bool, seconds: float) -> PreparedPartitions:
        """The record that trainings get."""
        return PreparedPartitions(
            path=str(path),
            key=self.key,
            fingerprint=self.fingerprint,
            num_partitions=len(self.partitions),
            num_files=len(self.files),
            num_bytes=sum(file.num_bytes for file in self.files),
            reused=reused,
            seconds=seconds,
        )


M = TypeVar("M", bound=SetManifest)


def build(listing: SampleListing, data: Data, key: str, records: Sequence[ShardRecord], num_rejected: int) -> Manifest:
    """Combine the records of the workers, in an order that does not depend on who finished first."""
    ordered = sorted(records, key=lambda record: (SPLITS.index(record.split), record.number))
    training = moments.merge(record.moments for record in ordered if record.split == "train")
    if listing.origin.num_frames:
        training = moments.over_frames(training, listing.origin.num_frames)
    shards = tuple(Shard(**{name: getattr(record, name) for name in Shard.model_fields}) for record in ordered)
    return Manifest(
        format_version=FORMAT_VERSION,
        key=key,
        fingerprint=fingerprint(shards, listing.class_names),
        image_shape=(data.image_size, data.image_size, listing.channels + listing.num_planes),
        stored_size=data.stored_side if data.keeps_aspect else None,
        storage="jpeg" if data.storage == "jpeg" else "raw",
        class_names=listing.class_names,
        target_names=listing.target_names,
        num_planes=listing.num_planes,
        ignored=listing.ignored,
        num_rejected=num_rejected,
        mean=training.scaled_mean()[: listing.channels] + (0.0,) * listing.num_planes,
        # What is divided by 255 of them comes out as it is: a mask is not normalised.
        std=training.scaled_std()[: listing.channels] + (1.0 / moments.FULL_SCALE,) * listing.num_planes,
        class_counts={split: class_counts(records, split, len(listing.class_names)) for split in SPLITS},
        shards=shards,
        provenance={
            "source": data.source,
            "root": data.root or "",
            "listing": listing.sha256,
            "host": socket.gethostname(),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "python": platform.python_version(),
            **decisive_versions(listing, data),
        },
    )


def class_counts(records: Sequence[ShardRecord], split: SplitName, num_classes: int) -> tuple[int, ...]:
    """Samples of one split by class."""
    counts = [record.class_counts for record in records if record.split == split]
    return tuple(map(sum, zip(*counts, strict=True))) if counts else (0,) * num_classes


def fingerprint(shards: Sequence[Shard], class_names: Sequence[str]) -> str:
    """8 hex digits over the content: class names and the hash of every file, split by split, in order."""
    content = [[shard.split, file.name, file.sha256] for shard in shards for file in shard.files]
    return _digest([list(class_names), content])


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:8]


def read(path: Path) -> Manifest:
    """Read the manifest of a set of images; raises as `read_as`."""
    return read_as(path, Manifest)


def read_as(path: Path, kind: type[M]) -> M:
    """Read a set's manifest; DamagedError if it is inconsistent, or a file is missing, linked or of another size."""
    # A link could lead anywhere, and the store never writes one.
    for name in (MANIFEST, REJECTED, *SPLITS, PARTITIONS):
        if (path / name).is_symlink():
            raise DamagedError(f"{name} is a link")
    try:
        manifest = kind.model_validate_json((path / MANIFEST).read_bytes())
    except OSError as error:
        raise DamagedError(f"{MANIFEST} cannot be read ({error.strerror})") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise DamagedError(f"{MANIFEST} is not valid at {place or 'its start'}: {first['msg']}") from error
    if manifest.format_version != FORMAT_VERSION:
        raise DamagedError(f"{MANIFEST} has format {manifest.format_version}, this program reads {FORMAT_VERSION}")
    if manifest.fingerprint != manifest.content():
        raise DamagedError(f"{MANIFEST} does not match its own fingerprint {manifest.fingerprint}")
    for file in manifest.files:
        _check_size(path, file)
    return manifest


def _check_size(path: Path, file: ShardFile | PartitionFile) -> None:
    try:
        status = (path / file.name).lstat()
    except OSError as error:
        raise DamagedError(f"{file.name} is missing") from error
    if not stat.S_ISREG(status.st_mode):
        raise DamagedError(f"{file.name} is not a file")
    if status.st_size != file.num_bytes:
        raise DamagedError(f"{file.name} has {status.st_size} bytes, recorded are {file.num_bytes}")
