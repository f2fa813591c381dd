"""WebDataset shards: `*.tar` whose members belong together by their names up to the first dot: `1.jpg` and `1.cls`.

Listing reads the headers and labels of an archive. A sample is a range of bytes of it, so that a worker reads only the
images of its own samples.
"""

import json
import os
import tarfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import IO, Any, NamedTuple

import numpy as np

from paceline.conf.data import Data
from paceline.tasks.data.decode.transform import DecodeError
from paceline.tasks.data.listing import Origin, SampleListing, SplitName, order_classes
from paceline.tasks.data.partitions import list_partitions, refuse_shared
from paceline.tasks.data.samples import File, Item, Sample, Samples, SamplesBuilder
from paceline.tasks.data.sources import folder
from paceline.tasks.data.storage import cache
from paceline.tasks.data.storage.read_files import read_files
from paceline.tasks.errors import InputError

TAR = ".tar"
PACKED = (".gz", ".tgz", ".zst", ".bz2", ".xz")
CLS, JSON = ".cls", ".json"
LABELS = ("label", "cls", "class")  # names of the label in a JSON member; the first that is there counts
MAX_LABEL_BYTES = 2**20
INDEX_VERSION = 1  # grows when the samples of an archive are listed in another way


class Shard(NamedTuple):
    """The samples of one archive."""

    samples: Samples  # a label is the place of its word in `words`
    words: tuple[str, ...]
    ignored: Counter[str]  # members that are neither images nor labels, by suffix


def list_samples(data: Data) -> SampleListing:
    """List the images of all archives below a root, or of the one archive that it is."""
    root = str(data.root)
    base, files, ignored = folder.find_files(root, frozenset({TAR}))
    if not files:
        packed = sorted(suffix for suffix in ignored if suffix in PACKED)
        fix = f"unpack those that end in {', '.join(packed)}" if packed else f"give a folder of files {TAR}"
        raise InputError(f"data.root={root}: holds no file {TAR}; {fix}")
    split_names = folder.splits_in_names(root, [file.path for file in files])
    filesystem, path = folder.open_root(base)
    listed_by: dict[str, str] = {}
    if folder.is_local(filesystem):
        for file in files:
            refuse_shared(root, listed_by, file.path, [os.path.realpath(f"{path}/{file.path}")])
    shards = list(list_partitions(partial(read_index, root, base), files))
    class_names = order_classes({word for shard in shards for word in shard.words})
    numbers = {word: number for number, word in enumerate(class_names)}
    parts: dict[SplitName, list[Samples]] = {}
    for split, (samples, words, unused) in zip(split_names, shards, strict=True):
        label_of = np.array([numbers[word] for word in words], dtype=np.int32)
        parts.setdefault(split, []).append(samples.with_labels(label_of[samples.labels]))
        ignored += unused
    if "train" not in parts:
        raise InputError(f"data.root={root}: no archive of the training split; name one train-0000{TAR}")
    splits = {split: Samples.join(part) for split, part in parts.items()}
    return SampleListing.of(data, Origin("webdataset", folder.absolute(base)), class_names, splits, ignored, channels=3)


def read_index(root: str, base: str, file: Sample) -> Shard:
    """Samples of an archive, cached on this host; InputError if it is damaged, lacks labels, or has a sample twice."""
    filesystem, path = folder.open_root(base)
    where, place = f"data.root={root}: {file.path}", folder.below(path, file.path)
    key = cache.key_of("webdataset", INDEX_VERSION, place, file.size, file.stamp)
    is_stamped = file.stamp not in (root, base)  # a root says nothing of the content
    if is_stamped and (recalled := cache.recall(key)) is not None:
        words, ignored, members = recalled
        return Shard(Samples.of(Sample(*member) for member in members), tuple(words), Counter(ignored))
    try:
        with filesystem.open(place, "rb") as stream:
            shard = _index(where, file, stream)
    except (tarfile.TarError, EOFError) as error:
        raise InputError(f"{where} is damaged or cut short ({error}); write it again") from error
    if is_stamped:
        cache.remember(key, [shard.words, shard.ignored, list(shard.samples)])
    return shard


def _index(where: str, file: Sample, stream: IO[bytes]) -> Shard:
    groups: dict[str, tuple[list[tarfile.TarInfo], list[str]]] = {}  # images and labels of each sample
    ignored: Counter[str] = Counter()
    for archive, member in _members(stream):
        name = member.name.removeprefix("./")
        if not member.isreg() or any(part.startswith(".") for part in name.split("/")):
            continue
        directory, slash, last = name.rpartition("/")
        key, dot, extension = last.partition(".")
        suffix = (dot + extension).lower()
        if suffix not in folder.IMAGE_SUFFIXES and suffix not in (CLS, JSON):
            ignored[suffix or "(none)"] += 1
            continue
        images, labels = groups.setdefault(directory + slash + key, ([], []))
        if suffix in folder.IMAGE_SUFFIXES:
            member.name = name
            images.append(member)
        else:
            labels += _words(where, archive, member, suffix)
    if not groups:
        raise InputError(f"{where}: holds no image; write images and labels into it, or remove it")
    faults = {
        "no image": [key for key, (images, _) in groups.items() if not images],
        "no label": [key for key, (_, labels) in groups.items() if not labels],
        "two images": [key for key, (images, _) in groups.items() if len(images) > 1],
        "two labels": [key for key, (_, labels) in groups.items() if len(set(labels)) > 1],
    }
    for fault, keys in faults.items():
        if keys:
            fix = f"give each sample one image and one label: KEY{CLS}, or KEY{JSON} with `{LABELS[0]}`"
            raise InputError(f"{where}: {len(keys)} of {len(groups)} samples have {fault}, such as {keys[0]}; {fix}")
    builder, numbers = SamplesBuilder(), dict[str, int]()
    for (member, *_), (word, *_) in groups.values():
        stamp = f"{member.offset_data}:{len(file.path)}:{file.stamp}"
        label = numbers.setdefault(word, len(numbers))
        builder.add(f"{file.path}/{member.name}", label, member.size, stamp)
    return Shard(builder.build(), tuple(numbers), ignored)


def _members(stream: IO[bytes]) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """The members of an archive; a TarError if it ends without its last block, or holds something else."""
    with tarfile.open(fileobj=stream, mode="r:") as archive:
        while (member := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # else it keeps all of them
            yield archive, member
        stream.seek(archive.offset)
        # tarfile takes a damaged header for the end.
        last = stream.read(tarfile.BLOCKSIZE)
        if len(last) < tarfile.BLOCKSIZE or any(last):
            raise tarfile.ReadError(f"no block of zeros at its end, byte {archive.offset}")


def _words(where: str, archive: tarfile.TarFile, member: tarfile.TarInfo, suffix: str) -> list[str]:
    """The label in a member, as text; none in a JSON member without one."""
    if member.size > MAX_LABEL_BYTES:
        raise InputError(f"{where}: {member.name} has {member.size} bytes; a label has up to {MAX_LABEL_BYTES}")
    stream = archive.extractfile(member)
    assert stream is not None
    try:
        text = stream.read().decode()
        value: Any = text.strip()
        if suffix == JSON:
            facts = json.loads(text)
            value = next((facts[name] for name in LABELS if name in facts), None) if isinstance(facts, dict) else None
    except ValueError as error:
        raise InputError(f"{where}: {member.name} is not {suffix[1:]} ({error}); write it again") from error
    if value is None or value == "":
        return []
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise InputError(f"{where}: {member.name} has the label {value!r:.100}; give a whole number or a word")
    return [str(value)]


def read(origin: Origin, samples: Samples, image_size: int) -> Iterator[Item]:
    """Read the range of bytes of each sample."""
    contents = read_files(origin.root, map(_file, samples))
    for content, size in zip(contents, samples.sizes.tolist(), strict=True):
        is_short = isinstance(content, bytes) and len(content) != size
        yield Item(DecodeError("the archive ends before this sample does") if is_short else content)


def _file(sample: Sample) -> File:
    start, length, stamp = sample.stamp.split(":", 2)
    return File(sample.path[: int(length)], sample.size, stamp, int(start))
