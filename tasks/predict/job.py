"""A prediction as data: what is predicted, by which model, how, and into which files."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from paceline.conf.data import Data, Signal
from paceline.conf.execution import Precision
from paceline.tasks.data.listing import Origin
from paceline.tasks.data.samples import Fit, Samples
from paceline.tasks.data.sources import clips, folder, pairs, signals
from paceline.tasks.data.sources import registry as source
from paceline.tasks.errors import InputError
from paceline.tasks.records.data import Reads
from paceline.tasks.records.record import Record

UNKNOWN = -1  # label of a sample of no class
VERSION = 2  # grows when a file of predictions gets another content
BATCH_PIXELS = 256 * 32 * 32
MAX_BATCH = 256


def batch_size_for(image_shape: tuple[int, int, int], num_views: int = 1) -> int:
    """Images of one forward pass on a CPU, fewer of large ones; for GPUs see `Predictor.batch_size`."""
    height, width, _ = image_shape
    return max(1, min(MAX_BATCH, BATCH_PIXELS // (height * width * num_views)))


class Images(NamedTuple):
    """Images, signals or clips to predict."""

    origin: Origin
    samples: Samples
    class_names: tuple[str, ...]  # of the samples' labels, or of their masks' values
    channels: int  # of a picture
    num_planes: int = 0  # 1 where each has a mask behind its channels


def in_folder(
    root: str,
    class_names: tuple[str, ...] | None,
    signal: Signal | None = None,
    *,
    num_frames: int = 0,
    leave_masks: bool = False,
    fit: Fit = "scale",
) -> Images:
    """All images below a root, in order of their names; signals if their settings are given, or clips of `num_frames`.

    One that lies in a folder named like a class is of that class. `class_names` is empty for models without classes of
    images, and None if each folder's name is one. `leave_masks` leaves out folders `masks` next to `images`, the layout
    of `data.source=pairs`. InputError if the root is missing or holds no image, signal or clip.
    """
    kind = clips.CLIPS if num_frames else folder.IMAGES if signal is None else signals.SIGNALS
    tree = clips.read_tree(root) if num_frames else folder.read_tree(root, kind.suffixes)
    if class_names is None:
        class_names = tuple(sorted({name.rpartition("/")[2] for name in tree.folders if name}))
    labels = {name: label for label, name in enumerate(class_names)}
    paths = [name.split("/") for name in tree.folders]
    label_of = [next((labels[part] for part in reversed(parts) if part in labels), UNKNOWN) for parts in paths]
    samples = tree.files.with_labels(np.array(label_of, dtype=np.int32)[tree.files.labels])
    if leave_masks:
        folders = set(tree.folders)

        def holds_masks(parts: list[str]) -> bool:
            siblings = ("/".join([*parts[:at], pairs.IMAGES]) for at, part in enumerate(parts) if part == pairs.MASKS)
            return not folders.isdisjoint(siblings)

        is_image = np.array([not holds_masks(parts) for parts in paths])
        samples = samples.take(np.flatnonzero(is_image[tree.files.labels]))
    if not samples:
        names = " ".join(sorted(kind.suffixes))
        raise InputError(f"{root}: holds no {kind.noun}; recognised are files named {names}", setting="SOURCE")
    origin = Origin(kind.origin, folder.absolute(root), signal=signal, num_frames=num_frames, fit=fit)
    return Images(origin, samples, class_names, kind.channels * max(1, num_frames))


def of_test_split(data: Data) -> Images:
    """The samples that a run with this configuration is evaluated on; InputError without any."""
    listing = source.list_samples(data)
    if not listing.test:
        raise InputError(f"data.source={data.source}: no test split; give the folder of the images instead")
    return Images(listing.origin, listing.test, listing.class_names, listing.channels, listing.num_planes)


class Settings(Record):
    """Execution of a model."""

    model_directory: str  # seen by all workers
    model_digest: str  # of its description and its weights
    precision: Precision
    gpu: bool
    num_threads: int  # CPU threads of one worker
    batch_size: int  # images of one forward pass on a CPU, and of a compiled one
    package: str | None = None  # what the user's package that offers the model is now; None for a model of Paceline's
    layer: str | None = None
    """Write the features of this layer in place of the model's predictions; None for predictions."""
    own_size: bool = False  # predict each image at its own size, in tiles; for models with outputs per pixel
    compiled: str | None = None
    """Directory of AOTInductor's packages for exactly these settings, one for each kind of CPU; None for eager
    execution."""


@dataclass(frozen=True)
class Part:
    """The work of one task: images, and the file for what is predicted of them."""

    number: int
    images: Images
    path: str
    key: str  # of the whole prediction


class PartRecord(Record):
    """Counts and times of a predicted part."""

    number: int
    num_samples: int  # predicted; those that could not be read are not among them
    num_rejected: int
    num_unread: int = 0  # of those, samples whose bytes could not be had: a later call tries them again
    num_known: int  # labelled samples; of a segmentation, labelled pixels
    num_correct: int
    class_pixels: tuple[int, ...] = ()
    """Of a segmentation with masks: correct, predicted and actual pixels, each of all classes."""
    read_seconds: float
    predict_seconds: float  # of the worker that did it
    reads: Reads = Reads()  # what it had to read from afar


Unit = Literal["samples", "pixels", "values", "features"]


class Parity(Record):
    """The model as it is executed against the same one in float32, eager, contiguous, unfolded."""

    num_samples: int
    unit: Unit = "samples"
    """What the agreement is a share of; values are those of denoised images, features those of a sample."""
    agreement: float
    """Share of the samples, or of their pixels, that get the same class; of the values that are the same but for what
    nobody sees (`paceline.tasks.predict.outputs.MAX_LEVELS`); of the samples whose features point the same way
    (`MIN_COSINE`)."""
    max_difference: float
    """Largest difference of a probability; of a segmentation, of the confidence in an image; of a denoised image, of a
    value, of 255; of features, of one of them."""
    max_target_difference: float | None = None  # of any regression target


def key_of(settings: Settings, images: Images) -> str:
    """64 hex digits over everything that the predictions depend on."""
    facts = [VERSION, settings.model_digest, settings.precision, images.origin.kind, images.origin.root]
    facts += [identity for identity in (settings.package, images.origin.identity) if identity]
    facts += [] if settings.layer is None else ["layer", settings.layer]
    facts += ["own_size"] if settings.own_size else []
    facts += [images.origin.fit] if images.origin.fit != "scale" else []
    digest = hashlib.sha256(json.dumps(facts).encode())
    for lines in images.samples.lines():
        digest.update(lines)
    return digest.hexdigest()


def cut(images: Images, out: Path, key: str, num_parts: int) -> Iterator[Part]:
    """Cut the samples in order into so many parts of nearly equal size."""
    borders = [len(images.samples) * number // num_parts for number in range(num_parts + 1)]
    for number, (start, stop) in enumerate(pairwise(borders)):
        path = str(out / f"part-{number:05d}.parquet")
        yield Part(number, images._replace(samples=images.samples[start:stop]), path, key)
