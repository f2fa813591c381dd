"""Listing: digits, class-named folders, the official CIFAR-10 archives, and what each refuses."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import pickle
import sys
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.registry import _registry

from paceline.conf.data import Data
from paceline.tasks.data import key
from paceline.tasks.data.decode.pixels import read_pixels
from paceline.tasks.data.listing import hold_out
from paceline.tasks.data.samples import Sample, Samples
from paceline.tasks.data.sources import cifar10, digits
from paceline.tasks.data.sources import registry as source
from paceline.tasks.data.sources.folder import stamp_of
from tests.support.listeners import listening
from tests.support.refusals import refused


def fill(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    return root


def folder(root: Path | str, **changes: float) -> Data:
    return Data(source="folder", root=str(root), **{"validation_fraction": 0.0, **changes})  # type: ignore[arg-type]


def test_holding_out_is_stratified_and_nearly_stable() -> None:
    samples = [Sample(f"{label}/{number}", label) for label in range(3) for number in range(100)]
    kept, held = hold_out(samples, 0.2)
    assert Counter(sample.label for sample in held) == {0: 20, 1: 20, 2: 20}
    assert sorted([*kept, *held]) == sorted(samples)
    assert list(kept) == [sample for sample in samples if sample in set(kept)]
    _, more = hold_out([*samples, Sample("0/new", 0)], 0.2)
    assert len(set(held) ^ set(more)) <= 2


def test_folder_with_splits(tmp_path: Path) -> None:
    fill(tmp_path, "train/b/2.JPG", "train/a/1.png", "train/a/deep/3.webp", "test/a/1.png", "test/b/1.gif")
    fill(tmp_path, "val/a/v.png", "val/b/v.png", "train/a/.hidden.png", ".git/x.png", "README", "train/a/notes.txt")
    fill(tmp_path, "extra/a/1.png")
    listing = source.list_samples(folder(tmp_path))
    assert listing.class_names == ("a", "b")
    assert [sample.path for sample in listing.train] == ["train/a/1.png", "train/a/deep/3.webp", "train/b/2.JPG"]
    assert [sample.path for sample in listing.validation] == ["val/a/v.png", "val/b/v.png"]
    assert [sample.label for sample in listing.test] == [0, 1]
    assert listing.ignored == {"(none)": 1, ".png": 1, ".txt": 1}
    described = key.describe(folder(tmp_path))
    assert (described.num_train, described.num_validation, described.num_test) == (3, 2, 2)


def test_folder_without_splits_and_without_a_test_folder(tmp_path: Path) -> None:
    names = [f"{name}/{number:02d}.png" for name in ("a", "b") for number in range(10)]
    plain = source.list_samples(folder(fill(tmp_path / "plain", *names), test_fraction=0.2, validation_fraction=0.25))
    assert (len(plain.train), len(plain.validation), len(plain.test)) == (12, 4, 4)
    trained = source.list_samples(folder(fill(tmp_path / "t", *(f"train/{name}" for name in names))))
    assert (len(trained.train), len(trained.test)) == (16, 4)


def test_linked_class_folders_are_followed_and_loops_end(tmp_path: Path) -> None:
    fill(tmp_path / "elsewhere", "1.png", "2.png")
    root = fill(tmp_path / "root", "a/1.png")
    (root / "b").symlink_to(tmp_path / "elsewhere")
    (root / "a" / "again").symlink_to(root)
    assert len(source.list_samples(folder(root, test_fraction=0.0)).train) == 3


@pytest.mark.parametrize(
    ("names", "data"),
    [
        ((), ()),
        (("root/.hidden",), ()),
        (("root/a/1.png",), ("1", "a")),
        (("root/1.png",), ("0",)),
        (("root/a/1.png", "root/b/1.txt"), ("b/",)),
        (("root/test/a/1.png", "root/test/b/1.png"), ("test/", "train/")),
        (("root/train/a/1.png", "root/train/b/1.png", "root/test/a/1.png"), ("train/", "test/", "b")),
        (("root/train/a/1.png", "root/val/a/1.png", "root/valid/a/1.png"), ("val", "valid")),
    ],
)
def test_wrong_roots_are_refused_on_one_line(tmp_path: Path, names: tuple[str, ...], data: tuple[str, ...]) -> None:
    fill(tmp_path, *names)
    with refused("data.root", tmp_path / "root", *data):
        source.list_samples(folder(tmp_path / "root"))


def test_more_wrong_roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, "a/1.png", "b/1.png")
    with refused("data.root", tmp_path / "a/1.png"):
        source.list_samples(folder(tmp_path / "a/1.png"))
    with refused("data.root", "a", "b", "data.test_fraction"):
        source.list_samples(folder(tmp_path, test_fraction=0.9))
    with refused("data.root", "nosuchprotocol://x"):
        source.list_samples(folder("nosuchprotocol://x"))
    in_b = f"{tmp_path}/b"
    monkeypatch.setattr(
        os, "access", lambda name, mode, dir_fd: str(Path(f"/proc/self/fd/{dir_fd}").readlink()) != in_b
    )
    with refused("data.root", "b/1.png"):
        source.list_samples(folder(tmp_path))


def test_a_store_without_its_package_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(_registry, "s3", raising=False)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with refused("data.root", "s3://b/x", "'paceline[s3]'"):
        source.list_samples(folder("s3://b/x"))


def test_every_url_works(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe({f"/listing/{name}/{n}.png": b"x" * n for name in "ab" for n in (1, 2)})
    listing = source.list_samples(folder("memory://listing", test_fraction=0.0))
    assert [(sample.path, sample.size) for sample in listing.train][:2] == [("a/1.png", 1), ("a/2.png", 2)]
    found = source.spec_of(listing.origin).read(listing.origin, listing.train, 8)
    assert [item.picture for item in found] == [b"x", b"xx", b"x", b"xx"]
    fill(tmp_path, "a/1.png", "b/1.png")
    by_url = source.list_samples(folder(f"file://{tmp_path}", test_fraction=0.0))
    assert list(by_url.train) == list(source.list_samples(folder(tmp_path, test_fraction=0.0)).train)


def test_the_key_follows_the_files_and_the_parameters(tmp_path: Path) -> None:
    root = fill(tmp_path, *(f"{name}/{n}.png" for name in "ab" for n in range(9)))
    keys = [key.describe(folder(root)).key, key.describe(folder(root)).key]
    fill(root, "a/new.png")
    keys.append(key.describe(folder(root)).key)
    (root / "a/new.png").write_bytes(b"yy")
    keys.append(key.describe(folder(root)).key)
    os.utime(root / "a/new.png", ns=(1, 1))
    keys.append(key.describe(folder(root)).key)
    keys.append(key.describe(folder(root, image_size=30)).key)
    (root / "a/new.png").unlink()
    assert keys[0] == keys[1] == key.describe(folder(root, max_rejected_fraction=0.5)).key
    assert len(set(keys)) == 5


def write_zip(path: Path, files: dict[str, bytes]) -> str:
    """An archive in which every file is of 1980, whenever it is written; its URL."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return f"zip://::{path}"


def test_archives_of_the_same_names_and_sizes_are_told_apart_by_what_they_hold(tmp_path: Path) -> None:
    files = {f"{name}/{n}.png": b"x" for name in "ab" for n in range(3)}
    first, again = (write_zip(tmp_path / f"{name}.zip", files) for name in ("first", "again"))
    other = write_zip(tmp_path / "other.zip", files | {"b/2.png": b"y"})
    assert key.describe(folder(first)).key == key.describe(folder(again)).key != key.describe(folder(other)).key


def test_where_a_file_system_tells_no_stamp_another_place_is_another_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.tasks.data.sources.folder._STAMPS", ())
    stream = io.BytesIO()
    np.savez(stream, images=np.zeros((6, 8, 8), np.uint8), labels=np.arange(6) % 2)
    for place in ("here", "there"):
        memory = fsspec.filesystem("memory")
        memory.pipe({f"/{place}/files/{name}/{n}.png": b"x" for name in "ab" for n in range(3)})
        memory.pipe(f"/{place}/tables/all.npz", stream.getvalue())
    for data in (folder("memory://PLACE/files"), Data(source="arrays", root="memory://PLACE/tables")):
        here, again, there = (
            key.describe(data.model_copy(update={"root": str(data.root).replace("PLACE", place)})).key
            for place in ("here", "here", "there")
        )
        assert here == again != there


ODD = {"a/[1].png": b"1", "a/?.png": b"22", "b/*.png": b"333", "b/x y.png": b"4444"}


def as_zip(directory: Path) -> str:
    return write_zip(directory / "odd.zip", ODD)


def as_folder_of_a_zip(directory: Path) -> str:
    files = {f"inside/{name}": content for name, content in ODD.items()}
    return write_zip(directory / "odd.zip", files).replace("://", "://inside", 1)


def as_tar(directory: Path) -> str:
    with tarfile.open(directory / "odd.tar", "w") as archive:
        for name, content in ODD.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return f"tar://::{directory / 'odd.tar'}"


def in_memory(directory: Path) -> str:
    fsspec.filesystem("memory").pipe({f"{directory}/{name}": content for name, content in ODD.items()})
    return f"memory:/{directory}"


def by_reference(directory: Path) -> str:
    """The one file system of fsspec itself that is asynchronous and needs no server."""
    refs = {f"inside/{name}": content.decode() for name, content in ODD.items()}
    (directory / "refs.json").write_text(json.dumps({"version": 1, "refs": refs}))
    return f"reference://inside::{directory / 'refs.json'}"


@pytest.mark.parametrize("lay", [as_zip, as_folder_of_a_zip, as_tar, in_memory, by_reference])
def test_files_are_read_by_their_names_as_they_are(tmp_path: Path, lay: Callable[[Path], str]) -> None:
    """Also where they lie in no folder below the root of their file system, or are called like patterns."""
    listing = source.list_samples(folder(lay(tmp_path), test_fraction=0.0))
    assert [sample.path for sample in listing.train] == sorted(ODD)
    found = source.spec_of(listing.origin).read(
        listing.origin, Samples.of([*listing.train, Sample("a/gone.png", 0)]), 8
    )
    *there, gone = [item.picture for item in found]
    assert there == [ODD[sample.path] for sample in listing.train]
    assert isinstance(gone, FileNotFoundError)


@pytest.mark.parametrize(
    ("info", "stamp"),
    [
        ({"ETag": '"5d"', "LastModified": "today"}, '"5d"'),
        ({"mtime": 0, "created": 7.5}, "7.5"),
        ({"CRC": 3_632_233_996, "date_time": (1980, 1, 1, 0, 0, 0)}, "3632233996"),
        ({"CRC": 0, "date_time": (1980, 1, 1, 0, 0, 0)}, "(1980, 1, 1, 0, 0, 0)"),
        ({"modify": "20260102030405"}, "20260102030405"),
        ({"modificationTime": 1_767_322_845_000}, "1767322845000"),
        ({"sha": "e69de29"}, "e69de29"),
        ({"hex": "e69de29"}, "e69de29"),
        ({"name": "a", "size": 3, "type": "file"}, ""),
    ],
)
def test_a_stamp_is_what_a_file_system_tells_of_the_content(info: dict[str, Any], stamp: str) -> None:
    assert stamp_of(info) == stamp


def test_digits_are_split_by_class() -> None:
    listing = source.list_samples(Data(source="digits"))
    assert listing.num_samples == 1_797
    assert len(listing.test) == pytest.approx(0.2 * 1_797, abs=5)
    images, targets, *_ = read_pixels(listing.origin, listing.train[:50], 28, 1)
    assert images.shape == (50, 28, 28, 1)
    assert images.max() > 230
    assert targets is None


def test_rotated_digits_share_no_source() -> None:
    listing = source.list_samples(Data(source="rotated_digits"))
    sources, angles = digits._rotations()
    used = [{int(sources[s.row]) for s in split} for split in (listing.train, listing.validation, listing.test)]
    assert all(not (first & second) for first, second in itertools.combinations(used, 2))
    assert len(listing.train) + len(listing.validation) == len(listing.test) == 5_000
    assert len(listing.validation) == pytest.approx(500, abs=30)
    assert np.abs(angles).max() <= np.pi / 4
    assert angles.std() == pytest.approx(np.pi / 4 / np.sqrt(3), rel=0.02)
    images, targets, *_ = read_pixels(listing.origin, listing.test[:9], 28, 1)
    assert images.shape == (9, 28, 28, 1)
    assert targets is not None
    assert targets.dtype == np.float32
    assert targets.shape == (9, 1)


def batches(rng: np.random.Generator) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return {name: (rng.integers(0, 256, (10, 3_072), dtype=np.uint8), rng.permutation(10)) for name in cifar10.BATCHES}


def python_files(content: dict[str, tuple[np.ndarray, np.ndarray]]) -> dict[str, bytes]:
    files = {
        name: pickle.dumps({b"data": data, b"labels": labels.tolist()}, protocol=2)
        for name, (data, labels) in content.items()
    }
    return {**files, "batches.meta": b"meta"}


def binary_files(content: dict[str, tuple[np.ndarray, np.ndarray]]) -> dict[str, bytes]:
    return {
        f"{name}.bin": np.concatenate([labels[:, None].astype(np.uint8), data], axis=1).tobytes()
        for name, (data, labels) in content.items()
    }


def write_tree(root: Path, files: dict[str, bytes]) -> Path:
    root.mkdir(parents=True)
    for name, content in files.items():
        (root / name).write_bytes(content)
    return root


def write_archive(path: Path, top: str, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"{top}/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path


def accept(monkeypatch: pytest.MonkeyPatch, *paths: Path, **contents: bytes) -> None:
    for name, content in {**{path.name: path.read_bytes() for path in paths}, **contents}.items():
        monkeypatch.setitem(cifar10.MD5, name, hashlib.md5(content).hexdigest())


@pytest.mark.parametrize("kind", ["python", "binary"])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("direct", [True, False])
def test_cifar10_archives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, packed: bool, direct: bool
) -> None:
    content = batches(np.random.default_rng(1))
    files = python_files(content) if kind == "python" else binary_files(content)
    top = "cifar-10-batches-py" if kind == "python" else "cifar-10-batches-bin"
    if packed:
        place = write_archive(tmp_path / f"cifar-10-{kind}.tar.gz", top, files)
        accept(monkeypatch, place, **files)
    else:
        place = write_tree(tmp_path / top, files)
        monkeypatch.setattr(cifar10, "BINARY_BATCH_BYTES", 10 * 3_073)
        if kind == "python":
            accept(monkeypatch, *place.iterdir())
    root = place if direct else tmp_path
    listing = source.list_samples(Data(source="cifar10", root=str(root), image_size=32, validation_fraction=0.2))
    assert (len(listing.train), len(listing.validation), len(listing.test)) == (40, 10, 10)
    images = read_pixels(listing.origin, listing.test, 32, 3).images_NHWC
    data, labels = content["test_batch"]
    assert np.array_equal(images, data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    assert [sample.label for sample in listing.test] == labels.tolist()


def test_wrong_checksums_and_sizes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = batches(np.random.default_rng(1))
    place = write_archive(tmp_path / "cifar-10-python.tar.gz", "cifar-10-batches-py", python_files(content))
    data = Data(source="cifar10", root=str(tmp_path))
    with refused("data.root", place.name, cifar10.MD5[place.name]):
        source.list_samples(data)
    place.unlink()
    root = write_tree(tmp_path / "cifar-10-batches-bin", binary_files(content))
    with refused("data.root", 30730):
        source.list_samples(data)
    (root / "data_batch_3.bin").unlink()
    monkeypatch.setattr(cifar10, "BINARY_BATCH_BYTES", 10 * 3_073)
    with refused("data.root", "data_batch_3"):
        source.list_samples(data)


def test_binary_batches_that_change_are_another_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has published checksums of them."""
    monkeypatch.setattr(cifar10, "BINARY_BATCH_BYTES", 10 * 3_073)
    root = write_tree(tmp_path / "cifar-10-batches-bin", binary_files(batches(np.random.default_rng(1))))
    data = Data(source="cifar10", root=str(root))
    before = key.describe(data).key
    assert key.describe(data).key == before
    content = bytearray((root / "data_batch_2.bin").read_bytes())
    content[1] ^= 1
    (root / "data_batch_2.bin").write_bytes(content)
    os.utime(root / "data_batch_2.bin", (1, 1))
    assert key.describe(data).key != before


class Malice:
    """Runs a command when unpickled by the standard unpickler."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (os.mkdir, ("malice-was-here",))


def test_malicious_pickles_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = python_files(batches(np.random.default_rng(1)))
    files["data_batch_2"] = pickle.dumps({b"data": Malice(), b"labels": [0]}, protocol=2)
    place = write_tree(tmp_path / "cifar-10-batches-py", files)
    accept(monkeypatch, *place.iterdir())
    monkeypatch.chdir(tmp_path)
    with refused("data.root", "data_batch_2", "mkdir"):
        source.list_samples(Data(source="cifar10", root=str(place)))
    assert not (tmp_path / "malice-was-here").exists()


def test_a_pickle_is_read_only_if_its_bytes_are_the_official_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    monkeypatch.setattr(cifar10, "RestrictedUnpickler", lambda *_, **__: read.append("read"))
    planted = pickle.dumps({b"data": np.zeros((10, 3_072), np.uint8), b"labels": [0] * 10}, protocol=2)
    monkeypatch.setattr(cifar10, "BINARY_BATCH_BYTES", 10 * 3_073)
    binary = binary_files(batches(np.random.default_rng(1)))
    # Of the size of a binary batch, whose checksum nobody has published: a pickle ends where it says.
    binary["test_batch.bin"] = planted[: 10 * 3_073].ljust(10 * 3_073, b"\0")
    root = write_tree(tmp_path / "binary", binary)
    with refused("data.root", "test_batch", 0, 9):
        source.list_samples(Data(source="cifar10", root=str(root)))
    files = python_files(batches(np.random.default_rng(1)))
    place = write_tree(tmp_path / "python", files)
    accept(monkeypatch, *place.iterdir())
    (place / "data_batch_1").write_bytes(planted)
    with refused("data.root", "data_batch_1", cifar10.MD5["data_batch_1"]):
        source.list_samples(Data(source="cifar10", root=str(place)))
    assert not read


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_members_of_an_archive_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: bytes) -> None:
    place = tmp_path / "cifar-10-binary.tar.gz"
    secret = tmp_path / "secret"
    secret.write_bytes(b"\1" * 3_073)
    with tarfile.open(place, "w:gz") as archive:
        for name, content in binary_files(batches(np.random.default_rng(1))).items():
            entry = tarfile.TarInfo(f"../../../{name}")
            if name == "test_batch.bin":
                entry.type, entry.linkname = kind, str(secret)
            else:
                entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    accept(monkeypatch, place)
    before = sorted(tmp_path.rglob("*"))
    with refused("data.root", place, "test_batch"):
        source.list_samples(Data(source="cifar10", root=str(place)))
    assert sorted(tmp_path.rglob("*")) == before


def test_cifar10_as_folders_and_other_files(tmp_path: Path) -> None:
    fill(tmp_path, "train/a/1.png", "train/b/1.png", "test/a/1.png", "test/b/1.png")
    data = Data(source="cifar10", root=str(tmp_path), validation_fraction=0.0)
    assert source.list_samples(data).origin.kind == "files"
    with refused("data.root", "cifar-10-python.tar.gz"):
        source.list_samples(Data(source="cifar10", root=str(tmp_path / "train/a/1.png")))
    with refused("data.root", tmp_path / "nowhere"):
        source.list_samples(Data(source="cifar10", root=str(tmp_path / "nowhere")))


@pytest.mark.parametrize("file", [digits._FILE, "moved/elsewhere.csv.gz"])
def test_the_digits_are_those_of_scikit_learn(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sklearn.datasets import load_digits

    monkeypatch.setattr(digits, "_FILE", file)
    images, labels = digits._digits.__wrapped__()
    assert (images == np.round(load_digits().images * (255.0 / 16.0))).all()
    assert (labels == load_digits().target).all()


@pytest.mark.parametrize("url", ["{}/::file:///tmp", "{}/x::memory://y", "simplecache::{}/::file:///tmp", "{}/x"])
def test_no_root_joins_a_scheduler(url: str) -> None:
    """fsspec's protocol `dask` unpickles what the scheduler in the URL sends."""
    with listening(b"nothing", answers=True) as hostile:
        root = url.format(hostile.address.replace("tcp://", "dask://"))
        with refused("data.root", root):
            key.describe(Data(source="folder", root=root))
        assert hostile.num_connections == 0


def test_a_class_whose_name_is_not_utf_8_is_refused_before_anything_is_decoded(tmp_path: Path) -> None:
    fill(tmp_path, *(f"cat/{number}.png" for number in range(9)))
    strange = os.fsencode(tmp_path) + b"/caf\xe9"
    os.mkdir(strange)  # noqa: PTH102  Path takes no bytes
    for number in range(9):
        Path(os.fsdecode(strange + b"/%d.png" % number)).write_bytes(b"x")
    with refused("data.root", tmp_path, "convmv") as caught:
        key.describe(folder(tmp_path))
    str(caught.value).encode()
