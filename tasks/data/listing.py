"""What a source offers, as cheap plain data, and how a share of each class is held out.

Knows neither file formats nor pixels: a sample is a name, a size, a stamp and a class.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tasks.errors import InputError

SplitName = Literal["train", "validation", "test"]
MIN_CLASSES = 2
SPLITS: tuple[SplitName, ...] = ("train", "validation", "test")


class Sample(NamedTuple):
    """One sample: a file, or a row of an array that the source reads as a whole."""

    path: str
    """Relative to the root; for arrays the name of the array."""
    label: int
    size: int = 0
    """Encoded size, bytes; 0 for rows of arrays."""
    stamp: str = ""
    """Changes when the content does: modification time or etag."""
    row: int = -1
    """Row of the array; -1 for files."""

    @property
    def name(self) -> str:
        """How people find the sample again."""
        return self.path if self.row < 0 else f"{self.path}#{self.row}"

    @property
    def text(self) -> str:
        """The name where it must be text, as in JSON and Parquet: a POSIX name may be any bytes."""
        return self.name.encode(errors="surrogateescape").decode(errors="replace")


@dataclass(frozen=True)
class Origin:
    """Where a worker reads samples from, as data."""

    kind: Literal["files", "digits", "rotated_digits", "cifar10"]
    root: str = ""


@dataclass(frozen=True)
class SampleListing:
    """Every sample of a source, by split, in a fixed order."""

    origin: Origin
    class_names: tuple[str, ...]
    train: tuple[Sample, ...]
    validation: tuple[Sample, ...]
    test: tuple[Sample, ...]
    channels: int
    target_names: tuple[str, ...] = ()
    ignored: dict[str, int] = field(default_factory=dict)
    """Files that are not samples, counted by suffix."""

    def split(self, name: SplitName) -> tuple[Sample, ...]:
        """The samples of one split."""
        return {"train": self.train, "validation": self.validation, "test": self.test}[name]

    @property
    def num_samples(self) -> int:
        """Samples over all splits."""
        return len(self.train) + len(self.validation) + len(self.test)

    @property
    def sha256(self) -> str:
        """Hash of names, sizes, stamps, labels and splits: it changes when any file is added, removed or changed."""
        digest = hashlib.sha256(repr((self.origin.kind, self.class_names, self.target_names)).encode())
        for split in SPLITS:
            digest.update(f"\n[{split}]\n".encode())
            for sample in self.split(split):
                # surrogateescape: a POSIX file name may be any bytes, and such a file is still a sample.
                line = f"{sample.name}\0{sample.label}\0{sample.size}\0{sample.stamp}\n"
                digest.update(line.encode(errors="surrogateescape"))
        return digest.hexdigest()


def hold_out(
    samples: Iterable[Sample], fraction: float, name: Callable[[Sample], str] | None = None
) -> tuple[tuple[Sample, ...], tuple[Sample, ...]]:
    """Split samples into (kept, held out), stratified by class and nearly stable when samples are added.

    Within a class the samples are ordered by the sha256 of their names and the first `fraction` are held out. A new
    sample moves at most one other sample across the border, so no test image drifts into training by the dozen.

    Args:
        samples: The samples in their fixed order, which both results keep.
        fraction: Share of each class to hold out, rounded half up.
        name: What is hashed; by default the sample's name.
    """
    samples = tuple(samples)
    by_class: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_class[sample.label].append(sample)
    held: set[Sample] = set()
    for members in by_class.values():
        count = int(fraction * len(members) + 0.5)
        if count:
            held.update(sorted(members, key=lambda sample: hash_name((name or _name)(sample)))[:count])
    return tuple(s for s in samples if s not in held), tuple(s for s in samples if s in held)


def hash_name(name: str) -> str:
    """A pseudo-random but eternal rank for a name."""
    return hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()


def check_classes(samples: Sequence[Sample], class_names: Sequence[str], where: str) -> None:
    """Refuse a training split that cannot be learned from.

    Raises:
        InputError: There are fewer than two classes, or one of them has no training sample.
    """
    if len(class_names) < MIN_CLASSES:
        raise InputError(
            f"{where}: found {len(class_names)} class{'' if len(class_names) == 1 else 'es'}"
            f"{' (' + class_names[0] + ')' if class_names else ''}; classification needs {MIN_CLASSES} or more; "
            "add a folder for each further class"
        )
    present = {sample.label for sample in samples}
    missing = [name for label, name in enumerate(class_names) if label not in present]
    if missing:
        raise InputError(
            f"{where}: no training sample of class {', '.join(missing[:5])}; every class needs at least one; "
            "add images, remove the class, or lower data.test_fraction and data.validation_fraction"
        )


def _name(sample: Sample) -> str:
    return sample.name
