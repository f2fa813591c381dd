"""Class-named folders of clips: video files, and folders with the frames of one clip as images, numbered.

A video file is one sample, and so is a folder with images in it, called by its path with a slash at the end.
"""

import dataclasses
import hashlib
import re
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from paceline.conf.data import NUM_COLOURS, Data
from paceline.tasks.data.decode import media
from paceline.tasks.data.decode.transform import DecodeError, decode
from paceline.tasks.data.listing import Origin, SampleListing
from paceline.tasks.data.samples import File, Item, Sample, Samples
from paceline.tasks.data.sources import folder
from paceline.tasks.data.storage.read_files import files_of, read_files
from paceline.tasks.errors import InputError

VIDEO_SUFFIXES = frozenset({".mp4", ".m4v", ".mov", ".3gp", ".avi", ".webm", ".mkv", ".mpg", ".mpeg", ".ts", ".gif"})
VIDEO_SUFFIXES |= {".flv", ".wmv", ".ogv"}
FRAME_SUFFIXES = folder.IMAGE_SUFFIXES - VIDEO_SUFFIXES
CLIPS = folder.Kind("clip", VIDEO_SUFFIXES | FRAME_SUFFIXES, "clips", NUM_COLOURS)
CLIP_VERSION = 1  # grows with every change of a clip's pixel (`decode/media.py`), or of which frames are taken


def list_samples(data: Data) -> SampleListing:
    """List class-named folders."""
    tree = read_tree(str(data.root))
    # Frames in a class's own folder would all be one clip.
    is_split = "train" in tree.folders
    for path in tree.files.paths:
        depth = path.count("/") - (is_split and path.partition("/")[0] in folder.SPLIT_FOLDERS)
        if path.endswith("/") and depth < 2:  # noqa: PLR2004 - the class and the clip
            fix = "give each clip's frames a folder in that of its class: CLASS/CLIP/0001.png"
            raise InputError(f"data.root={data.root}: images lie in {path}, which is not the folder of one clip; {fix}")
    return folder.list_samples(data, CLIPS, tree, data.num_frames)


def read_tree(root: str) -> folder.Tree:
    """Read all clips below a root; the clip of a folder belongs to the parent of that folder."""
    tree = folder.read_tree(root, CLIPS.suffixes)
    numbers = {name: number for number, name in enumerate(tree.folders)}
    clips: list[Sample] = []
    frames: dict[int, list[Sample]] = defaultdict(list)
    for sample in tree.files:
        (clips if folder.suffix_of(sample.path) in VIDEO_SUFFIXES else frames[sample.label]).append(sample)
    for number, members in frames.items():
        name = tree.folders[number]
        parent = numbers[name.rpartition("/")[0]] if name else number
        lines = "\n".join(f"{frame.path}\0{frame.size}\0{frame.stamp}" for frame in members)
        stamp = hashlib.sha256(lines.encode(errors="surrogateescape")).hexdigest()
        clips.append(Sample(f"{name}/", parent, sum(frame.size for frame in members), stamp))
    return dataclasses.replace(tree, files=Samples.of(sorted(clips)))


def read(origin: Origin, samples: Samples, image_size: int) -> Iterator[Item]:
    """The frames (S, S, T * C) of each clip, or why there are none."""
    videos = read_files(origin.root, (file for file in files_of(samples) if not file.path.endswith("/")))
    for path in samples.paths:
        try:
            if path.endswith("/"):
                yield Item(_of_folder(origin, path, image_size))
            else:
                yield Item(media.decode_video(_content(next(videos)), origin.num_frames, image_size))
        except (DecodeError, FileNotFoundError, PermissionError, MemoryError) as error:
            yield Item(error)


def _of_folder(origin: Origin, path: str, image_size: int) -> npt.NDArray[np.uint8]:
    filesystem, base = folder.open_root(origin.root)
    # Refresh: workers are long-lived, and some file systems cache listings.
    entries = filesystem.ls(folder.below(base, path).rstrip("/"), detail=True, refresh=True)
    infos = {info["name"].rstrip("/").rpartition("/")[2]: info for info in entries}
    # Frame 10 comes after frame 9, whether or not there are zeros before it.
    names = sorted(infos, key=lambda name: ([int(digits) for digits in re.findall(r"\d+", name)], name))
    frames = [name for name in names if not name.startswith(".") and folder.suffix_of(name) in FRAME_SUFFIXES]
    chosen = [frames[place] for place in media.places(len(frames), origin.num_frames)]
    files = (File(f"{path}{name}", int(infos[name]["size"] or 0), folder.stamp_of(infos[name])) for name in chosen)
    pixels = []
    for name, content in zip(chosen, read_files(origin.root, files), strict=True):
        try:
            pixels.append(decode(_content(content), image_size))
        except DecodeError as error:
            raise DecodeError(f"{name}: {error}") from error
    return np.concatenate(pixels, axis=2)


def _content(content: bytes | OSError) -> bytes:
    if isinstance(content, OSError):
        raise content
    return content
