"""The official CIFAR-10 archives (Krizhevsky 2009), python or binary, packed or unpacked; or class-named folders.

Source of the formats and checksums: https://www.cs.toronto.edu/~kriz/cifar.html. The python batches are pickles: their
bytes are checked against the official checksum, and then read by an unpickler that builds only plain types and arrays.
Both are needed: numpy's own pickles can be made to crash it, or worse.
"""

import functools
import hashlib
import io
import pickle
import tarfile
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.conf.data import Data
from paceline.tasks.data.listing import Origin, SampleListing, SplitName
from paceline.tasks.data.samples import Item, Sample, Samples
from paceline.tasks.data.sources import folder
from paceline.tasks.errors import InputError, one_line

MD5: dict[str, str] = {
    "cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a",
    "cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530",
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
    "batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
}
"""Official md5 sums. The unpacked binary batches have no published ones: their size and classes are checked."""
BINARY_BATCH_BYTES = 10_000 * 3_073
CLASS_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
TRAIN_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
BATCHES = (*TRAIN_BATCHES, "test_batch")
_ARCHIVES = ("cifar-10-python.tar.gz", "cifar-10-binary.tar.gz")
_FOLDERS = ("cifar-10-batches-py", "cifar-10-batches-bin")
_ALLOWED = {
    *(("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct")),
    *(("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")),
}

Batch = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]


def list_samples(data: Data) -> SampleListing:
    """List the official archives, or class-named folders where the root holds none."""
    root = folder.absolute(str(data.root))
    place = find_archive(root)
    if place is None:
        return folder.list_samples(data)
    stamps = check_archive(root, place)

    def samples(*names: str) -> Samples:
        labels = ((name, row, int(label)) for name in names for row, label in enumerate(read_batch(place, name)[1]))
        return Samples.of(Sample(name, label, 0, stamps[name], row) for name, row, label in labels)

    splits: dict[SplitName, Samples] = {"train": samples(*TRAIN_BATCHES), "test": samples("test_batch")}
    return SampleListing.of(data, Origin("cifar10", place), CLASS_NAMES, splits, channels=3)


def find_archive(root: str) -> str | None:
    """The URL of the official archive (packed or unpacked) that a root is or contains."""
    filesystem, path = folder.reach_root(root)
    if not filesystem.exists(path):
        raise InputError(f"data.root={root}: does not exist; give the CIFAR-10 archive or the folder that holds it")
    name = PurePosixPath(path).name
    if filesystem.isfile(path):
        if name in _ARCHIVES:
            return root
        raise InputError(f"data.root={root}: is a file but not {' or '.join(_ARCHIVES)}; give one of these or a folder")
    base = root.rstrip("/")
    if filesystem.exists(f"{path}/test_batch") or filesystem.exists(f"{path}/test_batch.bin"):
        return base
    return next((f"{base}/{entry}" for entry in (*_FOLDERS, *_ARCHIVES) if filesystem.exists(f"{path}/{entry}")), None)


def check_archive(root: str, place: str) -> dict[str, str]:
    """Compare an archive with the official checksums or sizes; return the stamps of its batches."""
    filesystem, path = folder.open_root(place)
    if filesystem.isfile(path):
        with filesystem.open(path, "rb") as stream:
            digest = hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False))
        _compare(root, PurePosixPath(path).name, digest.hexdigest())
        return dict.fromkeys(BATCHES, "")  # a checksum proves that a batch is the official one
    binary = filesystem.exists(f"{path}/test_batch.bin")
    stamps = {}
    for name in BATCHES if binary else (*BATCHES, "batches.meta"):
        file = f"{path}/{name}.bin" if binary else f"{path}/{name}"
        if not filesystem.exists(file):
            raise InputError(f"data.root={root}: {name} is missing; unpack the archive again")
        if binary and (size := filesystem.size(file)) != BINARY_BATCH_BYTES:
            fault = f"{name}.bin has {size} bytes, the official file {BINARY_BATCH_BYTES}"
            raise InputError(f"data.root={root}: {fault}; unpack the archive again")
        stamps[name] = (folder.stamp_of(filesystem.info(file)) or place) if binary else ""
    return stamps


def _compare(root: str, name: str, found: str) -> None:
    if found != MD5[name]:
        fault = f"{name} has md5 {found}, the official file has {MD5[name]}"
        raise InputError(f"data.root={root}: {fault}; download it again from the official site")


def read_samples(origin: Origin, samples: Samples, image_size: int) -> Iterator[Item]:
    """Images (32, 32, 3) of rows of batches."""
    assert samples.rows is not None
    images_NHWC, names = np.empty((len(samples), 32, 32, 3), dtype=np.uint8), np.array(list(samples.paths))
    for name in np.unique(names):
        chosen = names == name
        images_NHWC[chosen] = read_batch(origin.root, str(name))[0][samples.rows[chosen]]
    return map(Item, images_NHWC)


def read_batch(place: str, name: str) -> Batch:
    """Images (N, 32, 32, 3) and classes of one batch."""
    filesystem, path = folder.open_root(place)
    if filesystem.isfile(path):
        return _unpack(place)[name]
    suffix = ".bin" if filesystem.exists(f"{path}/{name}.bin") else ""
    return _parse(place, name, suffix, filesystem.cat_file(f"{path}/{name}{suffix}"))


@functools.lru_cache(maxsize=1)
def _unpack(place: str) -> dict[str, Batch]:
    """Every batch of a packed archive; cached, because a gzip stream has no random access."""
    filesystem, path = folder.open_root(place)
    batches = {}
    try:
        with filesystem.open(path, "rb") as stream, tarfile.open(fileobj=stream, mode="r:gz") as archive:
            for member in archive:
                # By its last name alone, into memory alone: no member can lead anywhere.
                name, _, suffix = PurePosixPath(member.name).name.partition(".")
                if name in BATCHES and member.isfile() and (content := archive.extractfile(member)) is not None:
                    batches[name] = _parse(place, name, f".{suffix}", content.read())
    except (tarfile.TarError, EOFError, OSError) as error:
        raise InputError(f"data.root={place}: cannot be unpacked ({error}); download it again") from error
    missing = [name for name in BATCHES if name not in batches]
    if missing:
        raise InputError(f"data.root={place}: {', '.join(missing)} missing in the archive; download it again")
    return batches


def _parse(place: str, name: str, suffix: str, content: bytes) -> Batch:
    if suffix == ".bin":
        records = np.frombuffer(content, dtype=np.uint8)
        if records.size % 3_073:
            raise InputError(f"data.root={place}: {name} is not a whole number of 3,073-byte records; unpack it again")
        records = records.reshape(-1, 3_073)
        pixels, labels = records[:, 1:], records[:, 0].astype(np.int64)
    else:
        _compare(place, name, hashlib.md5(content, usedforsecurity=False).hexdigest())
        try:
            batch = RestrictedUnpickler(io.BytesIO(content), encoding="bytes").load()
            pixels = np.asarray(batch[b"data"], dtype=np.uint8)
            labels = np.asarray(batch[b"labels"], dtype=np.int64)
        except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            fault = f"{name} is not a CIFAR-10 batch ({one_line(error)})"
            raise InputError(f"data.root={place}: {fault}; download it again from the official site") from error
        if pixels.shape != (labels.size, 3_072):
            raise InputError(f"data.root={place}: {name} holds an array of shape {pixels.shape}, not (N, 3072)")
    if labels.size and not 0 <= int(labels.min()) <= int(labels.max()) < len(CLASS_NAMES):
        raise InputError(f"data.root={place}: {name} has a class outside 0 to 9; download it again")
    return pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels


class RestrictedUnpickler(pickle.Unpickler):
    """Builds numpy arrays and plain types; anything else in a pickle is an attack or a mistake."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse everything that is not needed to rebuild an array."""
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not allowed")
        # The official batches were pickled when numpy._core was still numpy.core.
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)
