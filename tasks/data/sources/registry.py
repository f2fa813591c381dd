"""The table of data sources. They are listed in the caller's process and read on the workers, as are user plug-ins."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from paceline.conf.data import Data
from paceline.conf.plugins import source_facts
from paceline.tasks.data.listing import Origin, SampleListing, check_classes, keep_classes
from paceline.tasks.data.samples import Item, Samples
from paceline.tasks.data.sources import (
    arrays,
    cifar10,
    clips,
    digits,
    folder,
    generated,
    imagefolder,
    pairs,
    signals,
    user_source,
    webdataset,
)
from paceline.tasks.data.storage import s3
from paceline.tasks.data.storage.read_files import files_of, read_files
from paceline.tasks.errors import InputError, SourceError, one_line
from paceline.tasks.plugins import require_plugin


@dataclass(frozen=True)
class SourceSpec:
    """Functions that list and read one source; `paceline.conf.plugins` has the facts that settings are checked by."""

    kind: str  # `Origin.kind` of its listings. Sources of one kind share a reader, and the kind is part of a set's key.
    list_samples: Callable[[Data], SampleListing]
    read: Callable[[Origin, Samples, int], Iterable[Item]]
    """Yields the items of samples of this kind, in their order; takes the origin, the samples, and the size of images
    that the source draws. InputError if the root cannot be opened from this process or what lies there is damaged."""
    libraries: Callable[[SampleListing], tuple[str, ...]] = lambda _: ()
    """Packages whose versions decide on the pixels, besides Pillow, simplejpeg and NumPy."""
    key: Callable[[Origin], dict[str, Any]] = lambda _: {}
    """Further inputs of a set's key: settings and versions of a decoder."""
    has_rows: bool = False  # a sample is a row of an array, which costs a fiftieth of a file; chunks are larger


def spec_of(origin: Origin) -> SourceSpec:
    """The spec whose functions read this origin."""
    return _BY_KIND[origin.kind]


def list_samples(data: Data) -> SampleListing:
    """List all samples of the source, by split; InputError if it cannot be learned from, SourceError if not reached."""
    with require_plugin():
        needs_root = source_facts(data.source).needs_root
    if data.root is None and needs_root:
        raise InputError(f"data.root is not set; source {data.source} needs one; add data.root=DIR")
    spec = SOURCES.get(data.source, USER_SOURCE)
    try:
        listing = spec.list_samples(data)
    except InputError:
        raise
    except Exception as error:  # each remote file system raises its own: no credentials, no route, forbidden
        if s3.is_s3(str(data.root)):
            raise s3.refusal(str(data.root), error) from error
        message = f"data.root={data.root}: cannot be listed ({one_line(error)}); correct the address or the access"
        raise SourceError(message) from error
    listing = replace(listing, origin=replace(listing.origin, fit=data.fit))
    if listing.num_planes:
        if data.classes is not None:
            raise InputError(f"data.classes is for classes of whole images, and data.source={data.source} has masks")
        return listing
    if spec is not USER_SOURCE:  # of a user's source, only the classes that are learned need samples
        check_classes(listing, f"data.source={data.source}" if data.root is None else f"data.root={data.root}")
    if data.classes is not None:
        listing = keep_classes(listing, data.classes)
    check_classes(listing, f"data.source={data.source}")
    return listing


def _read_files(origin: Origin, samples: Samples, image_size: int) -> Iterator[Item]:
    return map(Item, read_files(origin.root, files_of(samples)))


DRAWING_VERSION = 2
DECODERS = {  # by their names in `SourceSpec.key`
    "clip": str(clips.CLIP_VERSION),
    "drawing": str(DRAWING_VERSION),
    "spectrogram": str(signals.SPECTROGRAM_VERSION),
}


def _clip_key(origin: Origin) -> dict[str, Any]:
    return {"clip": [origin.num_frames, clips.CLIP_VERSION]}


def _drawing_key(origin: Origin) -> dict[str, Any]:
    """Of textures and motions, which drew some of the `data.classes` wrongly in version 1."""
    return {"drawing": DRAWING_VERSION} | (_clip_key(origin) if origin.num_frames else {})


_of_rows = partial(SourceSpec, has_rows=True)
_of_digits = partial(_of_rows, libraries=lambda _: ("scikit-learn",))
_of_signals = partial(SourceSpec, libraries=signals.libraries, key=signals.key)
SOURCES: dict[str, SourceSpec] = {  # by the name in `data.source`
    "digits": _of_digits("digits", digits.list_digits, digits.read_digits),
    "rotated_digits": _of_digits("rotated_digits", digits.list_rotated_digits, digits.read_rotated_digits),
    "folder": SourceSpec("files", folder.list_samples, _read_files),
    # Its listings of class-named folders are of kind `files`.
    "cifar10": _of_rows("cifar10", cifar10.list_samples, cifar10.read_samples),
    "pairs": SourceSpec("pairs", pairs.list_samples, pairs.read),
    "shapes": _of_rows("shapes", partial(generated.list_samples, "shapes"), generated.read_shapes),
    "textures": _of_rows(
        "textures", partial(generated.list_samples, "textures"), generated.read_textures, key=_drawing_key
    ),
    "signals": _of_signals("signals", signals.list_samples, signals.read),
    "tones": _of_signals("tones", partial(generated.list_samples, "tones"), generated.read_tones),
    "arrays": _of_rows("arrays", arrays.list_samples, arrays.read, libraries=arrays.libraries),
    "clips": SourceSpec("clips", clips.list_samples, clips.read, libraries=lambda _: ("av",), key=_clip_key),
    "motions": SourceSpec(
        "motions", partial(generated.list_samples, "motions"), generated.read_motions, key=_drawing_key
    ),
    "webdataset": SourceSpec("webdataset", webdataset.list_samples, webdataset.read),
    "imagefolder": SourceSpec("files", imagefolder.list_samples, _read_files),
}
USER_SOURCE = SourceSpec("own", user_source.list_samples, user_source.read)  # spec of all other names
_BY_KIND = {spec.kind: spec for spec in (*SOURCES.values(), USER_SOURCE)}
