"""Images, signals or clips for prediction: from any folder, or a configuration's test split."""

from typing import NamedTuple

import numpy as np

from paceline.conf.data import Data
from paceline.conf.signal import Signal
from paceline.tasks.data.listing import Origin
from paceline.tasks.data.samples import Fit, Samples
from paceline.tasks.data.sources import clips, folder, pairs, signals
from paceline.tasks.data.sources import registry as source
from paceline.tasks.errors import InputError

UNKNOWN = -1


class Images(NamedTuple):
    """Samples to predict."""

    origin: Origin  # where they lie
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
    """All images below a root, in order of their names. One that lies in a folder named like a class is of that class.

    Args:
        root: A path, or any URL that fsspec reads.
        class_names: Classes; empty for models without image classes; None if each folder's name is one.
        signal: Settings of spectrograms; None for a model of images.
        num_frames: Frames of a clip; 0 for a model of images.
        leave_masks: Leave out folders `masks` next to `images`, the layout of `data.source=pairs`.
        fit: How images are brought to the size of the model's.

    Raises:
        InputError: The root is missing or holds no image, signal or clip.
    """
    kind = clips.CLIPS if num_frames else folder.IMAGES if signal is None else signals.SIGNALS
    tree = clips.read_tree(root) if num_frames else folder.read_tree(root, kind.suffixes)
    if class_names is None:
        class_names = tuple(sorted({name.rpartition("/")[2] for name in tree.folders if name}))
    labels = {name: label for label, name in enumerate(class_names)}
    label_of = np.array([_label(name, labels) for name in tree.folders], dtype=np.int32)
    samples = tree.files.with_labels(label_of[tree.files.labels])
    if leave_masks:
        folders = set(tree.folders)

        def holds_masks(folder: str) -> bool:
            parts = folder.split("/")
            siblings = ("/".join([*parts[:at], pairs.IMAGES]) for at, part in enumerate(parts) if part == pairs.MASKS)
            return not folders.isdisjoint(siblings)

        is_image = np.array([not holds_masks(name) for name in tree.folders])
        samples = samples.take(np.flatnonzero(is_image[tree.files.labels]))
    if not samples:
        raise InputError(
            f"{root}: holds no {kind.noun}; recognised are files named {' '.join(sorted(kind.suffixes))}",
            setting="SOURCE",
        )
    origin = Origin(kind.origin, folder.absolute(root), signal=signal, num_frames=num_frames, fit=fit)
    return Images(origin, samples, class_names, kind.channels * max(1, num_frames))


def of_test_split(data: Data) -> Images:
    """The samples that a run with this configuration is evaluated on; InputError without any."""
    listing = source.list_samples(data)
    if not listing.test:
        raise InputError(f"data.source={data.source}: no test split; give the folder of the images instead")
    return Images(listing.origin, listing.test, listing.class_names, listing.channels, listing.num_planes)


def _label(folder: str, labels: dict[str, int]) -> int:
    return next((labels[name] for name in reversed(folder.split("/")) if name in labels), UNKNOWN)
