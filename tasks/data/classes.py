"""Some of a source's classes, by their names: the others' samples are left out, whatever the source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tasks.data.listing import SampleListing
from tasks.data.samples import Samples
from tasks.errors import InputError

_LEFT_OUT = -1


def keep_classes(listing: SampleListing, wanted: Sequence[str]) -> SampleListing:
    """The listing with some of its classes, in its own order. What was held out of a class stays held out.

    Raises:
        InputError: there is no such class.
    """
    names = listing.class_names
    unknown = [name for name in wanted if name not in names]
    if unknown:
        raise InputError(f"data.classes: no class {', '.join(unknown)}; there are {', '.join(names)}")
    kept = [label for label, name in enumerate(names) if name in wanted]
    label_of = np.full(len(names), _LEFT_OUT, dtype=np.int32)
    label_of[kept] = np.arange(len(kept), dtype=np.int32)

    def of(samples: Samples) -> Samples:
        labels = label_of[samples.labels]
        chosen = np.flatnonzero(labels != _LEFT_OUT)
        return samples.take(chosen).labelled(labels[chosen])

    return replace(
        listing,
        class_names=tuple(names[label] for label in kept),
        train=of(listing.train),
        validation=of(listing.validation),
        test=of(listing.test),
    )
