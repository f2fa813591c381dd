"""Chooses the source that a configuration names, one of Paceline's or of the user's: all are listed and read alike.

Lists in the caller's process and reads on the workers; what a source looks like inside is known only to its module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from paceline.conf.data import Data
from paceline.conf.plugins import source_facts
from paceline.tasks.data.item import Item
from paceline.tasks.data.listing import Origin, OriginKind, SampleListing, check_classes, keep_classes
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
)
from paceline.tasks.data.sources import user_source as own
from paceline.tasks.data.storage import s3
from paceline.tasks.data.storage.read_files import files_of, read_files
from paceline.tasks.errors import InputError, SourceError, one_line
from paceline.tasks.plugins import require_plugin


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
        listing = LISTERS.get(data.source, own.list_samples)(data)
    except InputError:
        raise
    except Exception as error:  # each remote file system raises its own: no credentials, no route, forbidden
        if s3.is_s3(str(data.root)):
            raise s3.refusal(str(data.root), error) from error
        reason = one_line(error)
        raise SourceError(
            f"data.root={data.root}: cannot be listed ({reason}); mend the address or the access"
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
    """What the source has of each sample, in their order.

    Args:
        origin: Where they lie.
        samples: Which.
        image_size: What the pictures will be brought to; a source that draws them can draw that size.

    Raises:
        InputError: The root cannot be opened from this process, or what lies there is damaged.
        RunError: The user's source fails, or yields something else.
    """
    return iter(READERS[origin.kind](origin, samples, image_size))


def _items_of_files(origin: Origin, samples: Samples, image_size: int) -> Iterable[Item]:
    return map(Item, read_files(origin.root, files_of(samples)))


def _items_of_pairs(origin: Origin, samples: Samples, image_size: int) -> Iterable[Item]:
    images, masks = pairs.files_of(samples, origin.mask_suffix)
    return map(Item, read_files(origin.root, images), read_files(origin.root, masks))


def _items_of_signals(origin: Origin, samples: Samples, image_size: int) -> Iterable[Item]:
    assert origin.signal is not None
    return signals.read(read_files(origin.root, files_of(samples)), origin.signal, image_size)


def _items_of_clips(origin: Origin, samples: Samples, image_size: int) -> Iterable[Item]:
    return clips.read(origin, samples, image_size)


def _items_of_rotated_digits(origin: Origin, samples: Samples, image_size: int) -> Iterable[Item]:
    images_NHWC, angles_NT = digits.read_rotated_digits(samples, image_size)
    return (Item(image, None, angles) for image, angles in zip(images_NHWC, angles_NT, strict=True))


LISTERS: dict[str, Callable[[Data], SampleListing]] = {
    "digits": digits.list_digits,
    "rotated_digits": digits.list_rotated_digits,
    "folder": folder.list_samples,
    "cifar10": cifar10.list_samples,
    "pairs": pairs.list_samples,
    "shapes": generated.list_shapes,
    "textures": generated.list_textures,
    "signals": signals.list_samples,
    "tones": tones.list_samples,
    "arrays": arrays.list_samples,
    "clips": clips.list_samples,
    "motions": motions.list_samples,
}
"""By the name of the source; all others are the user's."""
READERS: dict[OriginKind, Callable[[Origin, Samples, int], Iterable[Item]]] = {
    "files": _items_of_files,
    "pairs": _items_of_pairs,
    "digits": lambda origin, samples, image_size: map(Item, digits.read_digits(samples, image_size)),
    "rotated_digits": _items_of_rotated_digits,
    "cifar10": lambda origin, samples, image_size: map(Item, cifar10.read_samples(origin.root, samples)),
    "shapes": lambda origin, samples, image_size: map(Item, *generated.read_shapes(samples, image_size)),
    "textures": lambda origin, samples, image_size: map(Item, generated.read_textures(samples, image_size)),
    "signals": _items_of_signals,
    "tones": lambda origin, samples, image_size: map(Item, tones.read_tones(origin, samples, image_size)),
    "arrays": lambda origin, samples, image_size: map(Item, array_rows.read_rows(origin.root, samples)),
    "clips": _items_of_clips,
    "motions": lambda origin, samples, image_size: map(Item, motions.read_motions(origin, samples, image_size)),
    "own": own.read,
}
