"""Images with a mask each: `images/` and `masks/` side by side, also below `train/` and `test/`, and `classes.txt`.

A mask is a picture without loss (PNG, TIFF, BMP, GIF) of its image's size that has its name but for the suffix. Its
values are the lines of `classes.txt`, from 0; 255 marks what belongs to no class, and counts for nothing.
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import PurePosixPath

from paceline.conf.data import Data
from paceline.tasks.data.listing import Origin, SampleListing, SplitName
from paceline.tasks.data.samples import File, Item, Sample, Samples
from paceline.tasks.data.sources import folder
from paceline.tasks.data.storage.read_files import files_of, read_files
from paceline.tasks.errors import InputError

IMAGES, MASKS, CLASSES = "images", "masks", "classes.txt"
MAX_CLASSES = 254  # a mask is stored in 8 bits, with one value for what belongs to no class
MASK_SUFFIXES = (".png", ".tif", ".tiff", ".bmp", ".gif")


def list_samples(data: Data) -> SampleListing:
    """List images that have a mask."""
    root = str(data.root)
    tree = folder.read_tree(root, trust_times=data.trust_directory_times)
    class_names = _class_names(root)
    images, masks = _by_place(tree.files, IMAGES), _by_place(tree.files, MASKS)
    suffixes = sorted({folder.suffix_of(sample.path) for sample in masks.values()})
    if len(suffixes) != 1 or suffixes[0] not in MASK_SUFFIXES:
        fix = f"they are pictures without loss, all with one of the suffixes {' '.join(MASK_SUFFIXES)} in lower case"
        raise InputError(f"data.root={root}: masks end in {', '.join(suffixes) or 'nothing: there are none'}; {fix}")
    for kind, other_kind, files, counterparts in ((IMAGES, MASKS, images, masks), (MASKS, IMAGES, masks, images)):
        alone = sorted(sample.path for place, sample in files.items() if place not in counterparts)
        if alone:
            fault = f"{len(alone)} of {len(files)} files in {kind}/ have no counterpart in {other_kind}/"
            raise InputError(f"data.root={root}: {fault}, such as {alone[0]}; add what is missing or remove them")
    splits: dict[SplitName, list[Sample]] = defaultdict(list)
    for place, image in sorted(images.items()):
        mask = masks[place]  # a pair changes when either of its files does
        stamp = f"{image.stamp} {mask.size} {mask.stamp}"
        splits[place[0]].append(Sample(image.path, 0, image.size + mask.size, stamp))
    if "train" not in splits:
        raise InputError(f"data.root={root}: no image of the training split has a mask; fill {IMAGES}/ and {MASKS}/")
    origin = Origin("pairs", folder.absolute(root), suffixes[0])
    columns = {split: Samples.of(samples) for split, samples in splits.items()}
    return SampleListing.of(data, origin, class_names, columns, tree.ignored, channels=3, num_planes=1)


def read(origin: Origin, samples: Samples, image_size: int) -> Iterator[Item]:
    """Read images with their masks."""
    images = (File(file.path, *_of_stamp(file)[0]) for file in files_of(samples))
    masks = (File(_mask_path(file.path, origin.mask_suffix), *_of_stamp(file)[1]) for file in files_of(samples))
    return map(Item, read_files(origin.root, images), read_files(origin.root, masks))


def _of_stamp(pair: File) -> tuple[tuple[int, str], tuple[int, str]]:
    """Size and stamp of the image and of the mask; nothing where stamps have blanks, as dates have."""
    parts = pair.stamp.split(" ")
    if len(parts) != len(("image", "size", "mask")):
        return (0, ""), (0, "")
    return (pair.size - int(parts[1]), parts[0]), (int(parts[1]), parts[2])


def _mask_path(path: str, suffix: str) -> str:
    parts = list(PurePosixPath(path).with_suffix(suffix).parts)
    parts[parts.index(IMAGES)] = MASKS
    return "/".join(parts)


def _by_place(samples: Samples, kind: str) -> dict[tuple[SplitName, str], Sample]:
    """Files below `images` or `masks` by their split and their path there, without its suffix."""
    by_place = {}
    for sample in samples:
        parts = PurePosixPath(sample.path).with_suffix("").parts
        split = folder.SPLIT_FOLDERS.get(parts[0]) if len(parts) > 1 and parts[0] != kind else "train"
        below = parts if parts[0] == kind else parts[1:]
        if split is not None and len(below) > 1 and below[0] == kind:
            by_place[split, "/".join(below[1:])] = sample
    return by_place


def _class_names(root: str) -> tuple[str, ...]:
    filesystem, base = folder.open_root(root)
    path = folder.below(base, CLASSES)
    if not filesystem.exists(path):
        fix = "it names the classes of the masks' values, one line for each, from 0"
        raise InputError(f"data.root={root}: {CLASSES} is missing; {fix}")
    text = filesystem.cat_file(path).decode(errors="replace").rstrip()
    names = tuple(line.strip() for line in text.splitlines())
    if not 2 <= len(names) <= MAX_CLASSES or not all(names) or len(set(names)) < len(names):  # noqa: PLR2004
        fix = f"it needs from 2 to {MAX_CLASSES} names, each once"
        raise InputError(f"data.root={root}: {CLASSES} has {len(names)} lines; {fix}")
    return names
