"""Sources of users: the protocol, and checks of what a source yields.

A source imports nothing of Paceline. It is opened in the caller's process, which lists it, and for each listing on the
workers that read it, once for each of their threads.
"""

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import numpy as np

from paceline.conf.data import Data
from paceline.conf.plugins import Plugin, SourceFacts, source_facts
from paceline.tasks.data.listing import SPLITS, Origin, SampleListing
from paceline.tasks.data.samples import Item, Picture, Samples, SamplesBuilder
from paceline.tasks.errors import InputError, OutsideError, RunError, SourceError
from paceline.tasks.plugins import attribute_errors_to, load_plugin

Listed = tuple[str, int] | tuple[str, int, str]  # name, class, and a stamp that changes when the content does


class Source(Protocol):
    """Protocol of a user's source, which infra/docs/guides/extend.md defines; its attribute `content` is optional."""

    class_names: Sequence[str]

    def samples(self) -> Iterable[Listed] | Mapping[str, Iterable[Listed]]:
        """Every sample, in an order that stays; a mapping where the source has splits."""

    def read(self, names: Sequence[str], image_size: int) -> Iterable[Any]:
        """Images of samples by their names, in the given order; pairs with masks or targets."""


def list_samples(data: Data) -> SampleListing:
    """List a user's source; InputError if it is not installed, fails or is wrong, SourceError if it raises OSError."""
    plugin, facts = load_plugin("source", data.source)[0], source_facts(data.source)
    root = data.root or ""
    if os.path.exists(root):  # noqa: PTH110  which takes any text
        root = str(Path(root).absolute())  # workers may have been started in another directory
    source = _open(data.source, root)
    with attribute_errors_to(plugin, "its listing", InputError, SourceError):
        class_names: tuple[Any, ...] = tuple(source.class_names)
        if not all(isinstance(name, str) and name for name in class_names) or len(set(class_names)) < len(class_names):
            raise InputError(f"{plugin}: class_names={class_names!r:.100}; give texts, each once")
        offered = source.samples()
        by_split = offered if isinstance(offered, Mapping) else {"train": offered}
        if "train" not in by_split or not set(by_split) <= set(SPLITS):
            fault = f"samples() gives the splits {', '.join(map(str, by_split)) or 'none'}"
            raise InputError(f"{plugin}: {fault}; give train, and if there are any also {' and '.join(SPLITS[1:])}")
        names: set[str] = set()
        splits = {name: _gather(plugin, by_split[name], len(class_names), names) for name in SPLITS if name in by_split}
        content = str(getattr(source, "content", ""))
        # Without stamps, samples of one name in two places differ by the place alone.
        place = root if any(split.stamps.any_empty() for split in splits.values()) else ""
    identity = f"{plugin.identity} {facts} {place} {content}"
    origin = Origin("own", root, name=data.source, identity=identity, listed=uuid4().hex)
    form: dict[str, Any] = {"target_names": facts.target_names, "num_planes": int(facts.has_masks)}
    return SampleListing.of(data, origin, class_names, splits, channels=facts.channels, **form)


def _gather(plugin: Plugin, listed: Iterable[Any], num_classes: int, seen: set[str]) -> Samples:
    builder = SamplesBuilder()
    for sample in listed:
        if not isinstance(sample, tuple) or len(sample) not in (2, 3):
            fix = "give tuples (name, label) or (name, label, stamp)"
            raise InputError(f"{plugin}: samples() gives {sample!r:.100}; {fix}")
        name, label, *stamp = sample
        if not isinstance(name, str) or not name or name in seen:
            raise InputError(f"{plugin}: samples() gives the name {name!r:.100}; give each sample a text of its own")
        if not isinstance(label, int | np.integer) or not 0 <= label < num_classes:
            fix = f"give whole numbers from 0 to {num_classes - 1}, the places of its {num_classes} class_names"
            raise InputError(f"{plugin}: sample {name} has the label {label!r:.100}; {fix}")
        if stamp and not isinstance(stamp[0], str):
            raise InputError(f"{plugin}: sample {name} has the stamp {stamp[0]!r:.100}; give a text")
        seen.add(name)
        builder.add(name, int(label), 0, *stamp)
    return builder.build()


def read(origin: Origin, samples: Samples, image_size: int) -> Iterator[Item]:
    """Read and check samples; InputError if the source is missing, RunError if it fails, OutsideError for OSError."""
    plugin, facts = load_plugin("source", origin.name)[0], source_facts(origin.name)
    place, names, number = (origin.name, origin.root), list(samples.paths), 0
    opened: dict[Any, tuple[str, Source]] = _opened.__dict__
    if place not in opened or opened[place][0] != origin.listed:
        opened[place] = origin.listed, _open(*place)
    with attribute_errors_to(plugin, "read", RunError, OutsideError):
        for sample in opened[place][1].read(names, image_size):
            if number == len(names):
                raise RunError(f"{plugin}: read() yields more than the {len(names)} requested samples")
            yield _item(f"{plugin}: sample {names[number]}", sample, facts)
            number += 1
    if number < len(names):
        raise RunError(f"{plugin}: read() ends after {number} of {len(names)} samples; yield one for each name")


def _item(what: str, one: Any, facts: SourceFacts) -> Item:
    if isinstance(one, Exception):
        return Item(one)
    is_pair = facts.has_masks or bool(facts.target_names)
    if is_pair and (not isinstance(one, tuple) or len(one) != 2):  # noqa: PLR2004
        raise RunError(f"{what} is {_describe(one)}; give a pair of an image and its mask or targets")
    picture, extra = one if is_pair else (one, None)
    if isinstance(picture, bytes) and facts.channels == 1:
        raise RunError(f"{what} is a file, which is decoded to 3 channels, and the source has 1; give an array")
    image = _picture(what, picture, facts.channels)
    if facts.has_masks:
        return Item(image, extra if isinstance(extra, Exception) else _mask(what, image, extra))
    if not facts.target_names:
        return Item(image)
    targets_T = np.asarray(extra, dtype=np.float32)
    if targets_T.shape != (len(facts.target_names),) or not np.isfinite(targets_T).all():
        raise RunError(f"{what} has the targets {extra!r:.100}; give {len(facts.target_names)} finite number")
    return Item(image, None, targets_T)


def _picture(what: str, one: Any, channels: int) -> Picture:
    if isinstance(one, bytes):
        return one
    shapes = "(H, W) or (H, W, 1)" if channels == 1 else f"(H, W, {channels})"
    if not isinstance(one, np.ndarray) or one.dtype != np.uint8:
        raise RunError(f"{what} is {_describe(one)}; give the bytes of an image file or an array of uint8 {shapes}")
    flat = one.ndim == 2 and channels == 1  # noqa: PLR2004
    if not (flat or (one.ndim == 3 and one.shape[2] == channels)) or 0 in one.shape:  # noqa: PLR2004
        raise RunError(f"{what} is {_describe(one)}; give {shapes}, or set channels")
    return one


def _mask(what: str, image: Picture, one: Any) -> Picture:
    """The mask of an image, in its form and of its size."""
    mask = _picture(f"{what}, its mask,", one, 1)
    if isinstance(image, bytes) != isinstance(mask, bytes):
        forms = ("a file" if isinstance(picture, bytes) else _describe(picture) for picture in (image, mask))
        raise RunError(f"{what} is {', and its mask '.join(forms)}; give both in one form")
    if isinstance(image, bytes) or isinstance(mask, bytes):  # files: whether they fit is seen when they are decoded
        return mask
    if mask.shape[:2] != image.shape[:2]:
        raise RunError(f"{what} is {_describe(image)}, and its mask {_describe(mask)}; give both one size")
    return mask.reshape(mask.shape[:2])


def _describe(one: Any) -> str:
    is_array = isinstance(one, np.ndarray)
    return f"an array of {one.dtype} {one.shape}" if is_array else f"{type(one).__name__} {one!r:.60}"


_opened = threading.local()  # sources that this thread has opened, by name and root, each with the id of its listing


def _open(name: str, root: str) -> Source:
    plugin, offered = load_plugin("source", name)
    with attribute_errors_to(plugin, f"opening {root or 'it'}", InputError, SourceError):
        source: Source = offered(root or None)
    return source
