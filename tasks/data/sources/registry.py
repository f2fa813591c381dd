"""The table of data sources, and functions that list and read the source that a configuration names.

Sources are listed in the caller's process and read on the workers. User plug-ins go the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from paceline.conf.data import Data
from paceline.conf.plugins import source_facts
from paceline.tasks.data.item import Item
from paceline.tasks.data.listing import Origin, SampleListing, check_classes, keep_classes
from paceline.tasks.data.samples import Samples
from paceline.tasks.data.sources import (
    array_rows,
    arrays,
    cifar10,
    clips,
    digits,
    folder,
    generated,
    motions,
    pairs,
    signals,
    tones,
    user_source,
)
from paceline.tasks.data.storage import s3
from paceline.tasks.data.storage.read_files import files_of, read_files
from paceline.tasks.errors import InputError, SourceError, one_line
from paceline.tasks.plugins import require_plugin


@dataclass(frozen=True)
class SourceSpec:
    """Functions that list and read one source; `paceline.conf.plugins` has the facts that settings are checked by."""

    kind: str
    """`Origin.kind` of its listings. Sources of one kind share a reader, and the kind is part of a set's key."""
    list_samples: Callable[[Data], SampleListing]
    read: Callable[[Origin, Samples, int], Iterable[Item]]
    """Yields the items of samples of this kind, in their order; takes the origin, the samples and the image size."""
    libraries: Callable[[SampleListing], tuple[str, ...]] = lambda _: ()
    """Packages whose versions decide on the pixels, besides Pillow, simplejpeg and NumPy."""
    key: Callable[[Origin], dict[str, Any]] = lambda _: {}
    """Further inputs of a set's key: settings and versions of a decoder."""
    has_rows: bool = False
    """A sample is a row of an array, which costs a fiftieth of a file; chunks are larger."""


def spec_of(origin: Origin) -> SourceSpec:
    """The spec whose functions read this origin."""
    return _BY_KIND[origin.kind]


def list_samples(data: Data) -> SampleListing:
    """Every sample that the source offers, by split.

    Raises:
        InputError: The source is missing, empty, or cannot be learned from; as `SourceError` if it cannot be reached.
    """
    with require_plugin():
        needs_root = source_facts(data.source).needs_root
    if data.root is None and needs_root:
        raise InputError(f"data.root is not set; source {data.source} needs one; add data.root=DIR")
    try:
        listing = SOURCES.get(data.source, USER_SOURCE).list_samples(data)
    except InputError:
        raise
    except Exception as error:  # each remote file system raises its own: no credentials, no route, forbidden
        if s3.is_s3(str(data.root)):
            raise s3.refusal(str(data.root), error) from error
        reason = one_line(error)
        raise SourceError(
            f"data.root={data.root}: cannot be listed ({reason}); correct the address or the access"
        ) from error
    listing = replace(listing, origin=replace(listing.origin, fit=data.fit))
    if data.classes is not None:
        if listing.num_planes:
            raise InputError(f"data.classes is for classes of whole images, and data.source={data.source} has masks")
        listing = keep_classes(listing, data.classes)
    if not listing.num_planes:
        check_classes(listing.train, listing.class_names, f"data.source={data.source}")
    return listing


def read_items(origin: Origin, samples: Samples, image_size: int) -> Iterator[Item]:
    """Read samples, in their order.

    Args:
        origin: Where they lie.
        samples: Which.
        image_size: What the pictures will be brought to; a source that draws them can draw that size.

    Raises:
        InputError: The root cannot be opened from this process, or what lies there is damaged.
        RunError: The user's source fails, or yields something else.
    """
    return iter(spec_of(origin).read(origin, samples, image_size))


def _read_files(origin: Origin, samples: Samples, image_size: int) -> Iterable[Item]:
    return map(Item, read_files(origin.root, files_of(samples)))


def _read_pairs(origin: Origin, samples: Samples, image_size: int) -> Iterable[Item]:
    images, masks = pairs.files_of(samples, origin.mask_suffix)
    return map(Item, read_files(origin.root, images), read_files(origin.root, masks))


def _read_signals(origin: Origin, samples: Samples, image_size: int) -> Iterable[Item]:
    assert origin.signal is not None
    return signals.read(read_files(origin.root, files_of(samples)), origin.signal, image_size)


def _read_rotated_digits(origin: Origin, samples: Samples, image_size: int) -> Iterable[Item]:
    images_NHWC, angles_NT = digits.read_rotated_digits(samples, image_size)
    return (Item(image, None, angles) for image, angles in zip(images_NHWC, angles_NT, strict=True))


def _signal_key(origin: Origin) -> dict[str, Any]:
    assert origin.signal is not None
    return {"signal": origin.signal.model_dump(mode="json"), "spectrogram": signals.SPECTROGRAM_VERSION}


def _clip_key(origin: Origin) -> dict[str, Any]:
    return {"clip": [origin.num_frames, clips.CLIP_VERSION]}


def _libraries(*names: str) -> Callable[[SampleListing], tuple[str, ...]]:
    return lambda _: names


SOURCES: dict[str, SourceSpec] = {
    "digits": SourceSpec(
        "digits",
        digits.list_digits,
        lambda origin, samples, image_size: map(Item, digits.read_digits(samples, image_size)),
        libraries=_libraries("scikit-learn"),
        has_rows=True,
    ),
    "rotated_digits": SourceSpec(
        "rotated_digits",
        digits.list_rotated_digits,
        _read_rotated_digits,
        libraries=_libraries("scikit-learn"),
        has_rows=True,
    ),
    "folder": SourceSpec("files", folder.list_samples, _read_files),
    "cifar10": SourceSpec(  # its listings of class-named folders are of kind `files`
        "cifar10",
        cifar10.list_samples,
        lambda origin, samples, image_size: map(Item, cifar10.read_samples(origin.root, samples)),
        has_rows=True,
    ),
    "pairs": SourceSpec("pairs", pairs.list_samples, _read_pairs),
    "shapes": SourceSpec(
        "shapes",
        generated.list_shapes,
        lambda origin, samples, image_size: map(Item, *generated.read_shapes(samples, image_size)),
        has_rows=True,
    ),
    "textures": SourceSpec(
        "textures",
        generated.list_textures,
        lambda origin, samples, image_size: map(Item, generated.read_textures(samples, image_size)),
        has_rows=True,
    ),
    "signals": SourceSpec(
        "signals", signals.list_samples, _read_signals, libraries=_libraries("scipy", "pyarrow"), key=_signal_key
    ),
    "tones": SourceSpec(
        "tones",
        tones.list_samples,
        lambda origin, samples, image_size: map(Item, tones.read_tones(origin, samples, image_size)),
        libraries=_libraries("scipy", "pyarrow"),
        key=_signal_key,
    ),
    "arrays": SourceSpec(
        "arrays",
        arrays.list_samples,
        lambda origin, samples, image_size: map(Item, array_rows.read_rows(origin.root, samples)),
        libraries=lambda listing: (array_rows.library_of(listing.train.paths[0]),),
        has_rows=True,
    ),
    "clips": SourceSpec("clips", clips.list_samples, clips.read, libraries=_libraries("av"), key=_clip_key),
    "motions": SourceSpec(
        "motions",
        motions.list_samples,
        lambda origin, samples, image_size: map(Item, motions.read_motions(origin, samples, image_size)),
        key=_clip_key,
    ),
}
"""Specs by the name in `data.source`."""
USER_SOURCE = SourceSpec("own", user_source.list_samples, user_source.read)
"""Spec of all other names."""
_BY_KIND = {spec.kind: spec for spec in (*SOURCES.values(), USER_SOURCE)}
