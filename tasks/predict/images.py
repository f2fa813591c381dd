"""Which images a source offers for prediction: a folder of any shape, or the test split of a configuration."""

from __future__ import annotations

import numpy as np

from conf.schema import Data
from tasks.data import source
from tasks.data.listing import Origin
from tasks.data.samples import Samples
from tasks.data.sources import folder
from tasks.errors import InputError

UNKNOWN = -1
Images = tuple[Origin, Samples, tuple[str, ...], int]
"""Where they lie, which they are, the names of their labels, channels."""


def in_folder(root: str, class_names: tuple[str, ...]) -> Images:
    """All images below a root, in order of their names. One that lies in a folder named like a class is of that class.

    Raises:
        InputError: the root is missing or holds no image.
    """
    labels = {name: label for label, name in enumerate(class_names)}
    tree = folder.read_tree(root)
    label_of = np.array([_label(name, labels) for name in tree.folders], dtype=np.int32)
    samples = tree.images.labelled(label_of[tree.images.labels])
    if not samples:
        raise InputError(
            f"{root}: holds no image; recognised are files named {' '.join(sorted(folder.IMAGE_SUFFIXES))}"
        )
    return Origin("files", folder.absolute(root)), samples, class_names, 3


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
