"""The samples of a source as plain data, and how a share of each class is held out."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from pydantic import Field

from paceline.conf.data import MIN_CLASSES, Data, Signal
from paceline.tasks.data.samples import Fit, Sample, Samples
from paceline.tasks.errors import InputError
from paceline.tasks.records.record import Record


class Listing(Record):
    """Summary of a source. `num_*` are counts of listed samples."""

    key: str
    """sha256 (hex) of the preparation's inputs: listing, transform, library versions. Names the prepared set."""
    class_names: tuple[str, ...]
    num_train: int
    num_validation: int
    num_test: int
    channels: int  # of a picture, before masks
    target_names: tuple[str, ...] = ()  # as in `PreparedSet`
    ignored: dict[str, int] = Field(default_factory=dict)  # files that are not samples, counted by suffix
    sizes: dict[str, int] = Field(default_factory=dict)
    """Expected bytes of the prepared set by its key: one for each form that `data.storage` allows, pixels first."""


SplitName = Literal["train", "validation", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "validation", "test")


@dataclass(frozen=True)
class Origin:
    """Where a worker reads samples from, as data."""

    kind: str  # `SourceSpec.kind` of the reader
    root: str = ""
    mask_suffix: str = ""  # suffix of the masks, of `pairs`
    name: str = ""  # name of a user's source in the configuration
    identity: str = ""  # package of a user's source, and the content that the source declares
    listed: str = ""  # id of the listing of a user's source; long-lived workers open the source again for each listing
    signal: Signal | None = None  # how signals become images
    num_frames: int = 0  # frames of a prepared clip; 0 for images
    fit: Fit = "scale"  # how images are brought to their size


@dataclass(frozen=True)
class SampleListing:
    """Every sample of a source, by split, in a fixed order."""

    origin: Origin
    class_names: tuple[str, ...]
    train: Samples
    validation: Samples
    test: Samples
    channels: int  # channels of an image
    target_names: tuple[str, ...] = ()
    num_planes: int = 0
    """1 where each picture has a mask behind its channels, and the classes are those of its pixels: 1 and up, in the
    order of the names; 0 is no class, and the loss ignores it."""
    ignored: dict[str, int] = field(default_factory=dict)  # files that are not samples, counted by suffix
    run: int = 1
    """Training samples that follow each other into one shard: more than 1 where neighbours are read together."""

    @classmethod
    def of(
        cls,
        data: Data,
        origin: Origin,
        class_names: tuple[str, ...],
        splits: Mapping[SplitName, Samples],
        ignored: Mapping[str, int] | None = None,
        **facts: Any,
    ) -> SampleListing:
        """A listing of these splits, `train` among them; others that are missing are held out of the training split."""
        train, validation, test = (splits.get(name) for name in SPLITS)
        assert train is not None
        if test is None:
            train, test = hold_out(train, data.test_fraction)
        if validation is None:
            train, validation = hold_out(train, data.validation_fraction)
        ignored = dict(sorted((ignored or {}).items()))
        return cls(origin, class_names, train, validation, test, ignored=ignored, **facts)

    def split(self, name: SplitName) -> Samples:
        """The samples of one split."""
        samples: Samples = getattr(self, name)
        return samples

    @property
    def num_samples(self) -> int:
        """Samples over all splits."""
        return len(self.train) + len(self.validation) + len(self.test)

    @cached_property
    def sha256(self) -> str:
        """Hash of names, sizes, stamps, labels and splits, and of the package of a user's source."""
        digest = hashlib.sha256(repr((self.origin.kind, self.class_names, self.target_names)).encode())
        digest.update(self.origin.identity.encode())
        for split in SPLITS:
            digest.update(f"\n[{split}]\n".encode())
            for lines in self.split(split).lines():
                digest.update(lines)
        return digest.hexdigest()


def hold_out(samples: Iterable[Sample], fraction: float) -> tuple[Samples, Samples]:
    """Split samples into (remaining, held out), stratified by class and nearly stable when samples are added.

    Within a class the samples are ordered by the sha256 of their names and the first `fraction` (rounded half up) are
    held out. A new sample moves at most one other sample across the border. Both results keep the order of `samples`.
    """
    samples = Samples.of(samples)
    held = np.zeros(len(samples), dtype=np.bool_)
    order = np.argsort(samples.labels, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(samples.labels[order])) + 1):
        count = int(fraction * len(members) + 0.5)
        if count:
            names = (name.encode(errors="surrogateescape") for name in samples.take(members).names())
            digests = np.fromiter((hashlib.sha256(name).digest() for name in names), dtype="S32", count=len(members))
            held[members[np.argsort(digests, kind="stable")[:count]]] = True
    return samples.take(np.flatnonzero(~held)), samples.take(np.flatnonzero(held))


def order_classes(words: set[str]) -> tuple[str, ...]:
    """Class names in the order of their numbers if all are whole numbers, else in that of words."""
    are_numbers = all(word.isascii() and word.removeprefix("-").isdecimal() for word in words)
    return tuple(sorted(words, key=(lambda word: (int(word), word)) if are_numbers else (lambda word: (0, word))))


def check_classes(listing: SampleListing, where: str) -> None:
    """Raise InputError for fewer than two classes, a name that is not UTF-8, or a class without a training sample."""
    class_names = listing.class_names
    if unreadable := [name for name in class_names if re.search("[\ud800-\udfff]", name)]:
        fix = "rename its folder, for example with: convmv -f latin1 -t utf-8 --notest FOLDER"
        raise InputError(f"{where}: the name of class {unreadable[0]!r} is not UTF-8, so no report can hold it; {fix}")
    if len(class_names) < MIN_CLASSES:
        count_text = f"1 class ({class_names[0]})" if class_names else "0 classes"
        fault = f"found {count_text}; classification needs {MIN_CLASSES} or more"
        raise InputError(f"{where}: {fault}; add a folder for each further class")
    labels = set(np.unique(listing.train.labels).tolist())
    missing = [name for label, name in enumerate(class_names) if label not in labels]
    if missing:
        raise InputError(
            f"{where}: no training sample of class {', '.join(missing[:5])}; every class needs at least one; "
            "add images, remove the class, or lower data.test_fraction and data.validation_fraction"
        )


def keep_classes(listing: SampleListing, wanted: Sequence[str]) -> SampleListing:
    """The listing with some of its classes, in its own order and splits; InputError if a class does not exist."""
    names = listing.class_names
    unknown = [name for name in wanted if name not in names]
    if unknown:
        raise InputError(f"data.classes: no class {', '.join(unknown)}; use some of {', '.join(names)}")
    chosen_labels = [label for label, name in enumerate(names) if name in wanted]
    label_of = np.full(len(names), -1, dtype=np.int32)
    label_of[chosen_labels] = np.arange(len(chosen_labels), dtype=np.int32)

    def select(samples: Samples) -> Samples:
        labels = label_of[samples.labels]
        chosen = np.flatnonzero(labels >= 0)
        return samples.take(chosen).with_labels(labels[chosen])

    train, validation, test = (select(listing.split(name)) for name in SPLITS)
    class_names = tuple(names[label] for label in chosen_labels)
    return replace(listing, class_names=class_names, train=train, validation=validation, test=test)
