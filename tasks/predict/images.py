"""Which images or signals a source offers for prediction: a folder of any shape, or a configuration's test split."""

from __future__ import annotations

import numpy as np

from conf.schema import Data
from conf.signal import Signal
from tasks.data import source
from tasks.data.listing import Origin
from tasks.data.samples import Samples
from tasks.data.sources import folder, signals
from tasks.errors import InputError

UNKNOWN = -1
Images = tuple[Origin, Samples, tuple[str, ...], int]
"""Where they lie, which they are, the names of their labels, channels."""


def in_folder(root: str, class_names: tuple[str, ...], signal: Signal | None = None) -> Images:
    """All images below a root, in order of their names. One that lies in a folder named like a class is of that class.

    Args:
        root: Of the folder.
        class_names: Of the model.
        signal: How signals became the pictures that the model knows; None for a model of images.

    Raises:
        InputError: the root is missing or holds no image, or no signal.
    """
    kind = folder.IMAGES if signal is None else signals.SIGNALS
    labels = {name: label for label, name in enumerate(class_names)}
    tree = folder.read_tree(root, kind.suffixes)
    label_of = np.array([_label(name, labels) for name in tree.folders], dtype=np.int32)
    samples = tree.files.labelled(label_of[tree.files.labels])
    if not samples:
        raise InputError(f"{root}: holds no {kind.noun}; recognised are files named {' '.join(sorted(kind.suffixes))}")
    return Origin(kind.origin, folder.absolute(root), signal=signal), samples, class_names, kind.channels


def of_test_split(data: Data) -> Images:
    """The samples that a run with this configuration is evaluated on.

    Raises:
        InputError: the source is missing or wrong, or has none.
    """
    listing = source.list_samples(data)
    if not listing.test:
        raise InputError(f"data.source={data.source}: no test split; give the folder of the images instead")
    return listing.origin, listing.test, listing.class_names, listing.channels


def _label(folder: str, labels: dict[str, int]) -> int:
    return next((labels[name] for name in reversed(folder.split("/")) if name in labels), UNKNOWN)
