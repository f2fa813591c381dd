"""Images with a mask each: `images/` and `masks/` side by side, also below `train/` and `test/`, and `classes.txt`.

A mask is a picture without loss (PNG, TIFF, BMP, GIF) of its image's size that has its name but for the suffix. Its
values are the lines of `classes.txt`, from 0; 255 marks what belongs to no class, and counts for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from paceline.conf.data import Data
from paceline.tasks.data.listing import SPLITS, Origin, SampleListing, SplitName, hold_out
from paceline.tasks.data.samples import Sample, Samples
from paceline.tasks.data.sources import folder
from paceline.tasks.data.storage import read_files as reading
from paceline.tasks.data.storage.read_files import File
from paceline.tasks.errors import InputError

IMAGES, MASKS, CLASSES = "images", "masks", "classes.txt"
MAX_CLASSES = 254
"""A mask is stored in 8 bits, with one value for what belongs to no class."""
MASK_SUFFIXES = (".png", ".tif", ".tiff", ".bmp", ".gif")


def list_samples(data: Data) -> SampleListing:
    """List images that have a mask.

    Raises:
        InputError: The root or its layout is wrong.
    """
    root = str(data.root)
    tree = folder.read_tree(root)
    class_names = _class_names(root)
    images, masks = _by_place(tree.files, IMAGES), _by_place(tree.files, MASKS)
    suffix = _mask_suffix(root, masks)
    _check_complete(root, images, masks)
    by_split = {
        split: Samples.of(
            _with_mask(sample, masks[place]) for place, sample in sorted(images.items()) if place[0] == split
        )
        for split in SPLITS
    }
    train, validation, test = (by_split[split] for split in SPLITS)
    if not train:
        raise InputError(f"data.root={root}: no image of the training split has a mask; fill {IMAGES}/ and {MASKS}/")
    if not test:
        train, test = hold_out(train, data.test_fraction)
    if not validation:
        train, validation = hold_out(train, data.validation_fraction)
    return SampleListing(
        origin=Origin("pairs", folder.absolute(root), suffix),
        class_names=class_names,
        train=train,
        validation=validation,
        test=test,
        channels=3,
        num_planes=1,
        ignored=dict(sorted(tree.ignored.items())),
    )


def files_of(samples: Samples, suffix: str) -> tuple[Iterator[File], Iterator[File]]:
    """The images and the masks of samples."""
    images = (File(file.path, *_of_stamp(file)[0]) for file in reading.files_of(samples))
    masks = (File(mask_path(file.path, suffix), *_of_stamp(file)[1]) for file in reading.files_of(samples))
    return images, masks


def _of_stamp(pair: File) -> tuple[tuple[int, str], tuple[int, str]]:
    """Size and stamp of the image and of the mask; nothing where stamps have blanks, as dates have."""
    parts = pair.stamp.split(" ")
    if len(parts) != len(("image", "size", "mask")):
        return (0, ""), (0, "")
    return (pair.size - int(parts[1]), parts[0]), (int(parts[1]), parts[2])


def mask_path(path: str, suffix: str) -> str:
    """Path of the mask of an image, relative to the root."""
    parts = list(PurePosixPath(path).with_suffix(suffix).parts)
    parts[parts.index(IMAGES)] = MASKS
    return "/".join(parts)


Place = tuple[SplitName, str]
"""The split, and the path below `images` or `masks` without its suffix."""


def _by_place(samples: Samples, kind: str) -> dict[Place, Sample]:
    by_place = {}
    for sample in samples:
        parts = PurePosixPath(sample.path).with_suffix("").parts
        split = folder.SPLIT_FOLDERS.get(parts[0]) if len(parts) > 1 and parts[0] != kind else "train"
        below = parts if parts[0] == kind else parts[1:]
        if split is not None and len(below) > 1 and below[0] == kind:
            by_place[split, "/".join(below[1:])] = sample
    return by_place


def _with_mask(image: Sample, mask: Sample) -> Sample:
    """A pair changes when either of its files does."""
    return Sample(image.path, 0, image.size + mask.size, f"{image.stamp} {mask.size} {mask.stamp}")


def _class_names(root: str) -> tuple[str, ...]:
    filesystem, base = folder.open_root(root)
    path = folder.below(base, CLASSES)
    if not filesystem.exists(path):
        raise InputError(
            f"data.root={root}: {CLASSES} is missing; it names the classes of the masks' values, one line for each, "
            "from 0"
        )
    names = tuple(line.strip() for line in filesystem.cat_file(path).decode(errors="replace").splitlines())
    while names and not names[-1]:
        names = names[:-1]
    if not 2 <= len(names) <= MAX_CLASSES or not all(names) or len(set(names)) < len(names):  # noqa: PLR2004
        raise InputError(
            f"data.root={root}: {CLASSES} has {len(names)} lines; it needs from 2 to {MAX_CLASSES} names, each once"
        )
    return names


def _mask_suffix(root: str, masks: dict[Place, Sample]) -> str:
    suffixes = sorted({folder.suffix_of(sample.path) for sample in masks.values()})
    if len(suffixes) != 1 or suffixes[0] not in MASK_SUFFIXES:
        raise InputError(
            f"data.root={root}: masks end in {', '.join(suffixes) or 'nothing: there are none'}; they are pictures "
            f"without loss, all with one of the suffixes {' '.join(MASK_SUFFIXES)} in lower case"
        )
    return suffixes[0]


def _check_complete(root: str, images: dict[Place, Sample], masks: dict[Place, Sample]) -> None:
    for kind, other_kind, files, counterparts in ((IMAGES, MASKS, images, masks), (MASKS, IMAGES, masks, images)):
        alone = sorted(sample.path for place, sample in files.items() if place not in counterparts)
        if alone:
            raise InputError(
                f"data.root={root}: {len(alone)} of {len(files)} files in {kind}/ have no counterpart in "
                f"{other_kind}/, such as {alone[0]}; add what is missing or remove them"
            )
