"""Prepared sets that somebody else has made, or changed: they are data, and lead nowhere."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.conf.data import Data
from paceline.tasks.data.key import FORMAT_VERSION
from paceline.tasks.data.loading.split_reader import open_split
from paceline.tasks.data.prepare import manifest, store
from paceline.tasks.data.prepare.chunks import ChunkPlanner
from paceline.tasks.data.prepare.shard import write_shards
from paceline.tasks.data.sources import registry as source
from paceline.tasks.errors import RunError
from paceline.tasks.files import TEMPORARY_SUFFIX, sha256_of
from paceline.tasks.records.data import PARTITIONS, PreparedSet
from tests.support.refusals import refused

KEY = "0" * 64
READ = manifest.PartitionsManifest


@pytest.fixture
def prepared(tmp_path: Path) -> PreparedSet:
    """The digits, as the workers would prepare them."""
    data = Data(source="digits", image_size=8)
    listing = source.list_samples(data)
    with store.temporary(tmp_path, KEY) as directory:
        records = write_shards(list(ChunkPlanner(listing, data, directory).chunks()))
        facts = manifest.build(listing, data, KEY, records, 0)
        path = store.publish(tmp_path, directory, facts, [])
    return facts.to_prepared_set(path, reused=False, seconds=0.0)


def forge(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest as somebody would who knows how fingerprints are made."""
    place = path / manifest.MANIFEST
    tree = json.loads(place.read_text())
    change(tree)
    content = [[shard["split"], file["name"], file["sha256"]] for shard in tree["shards"] for file in shard["files"]]
    tree["fingerprint"] = hashlib.sha256(json.dumps([tree["class_names"], content]).encode()).hexdigest()[:8]
    place.write_text(json.dumps(tree))


def plant(path: Path, name: str, content: bytes) -> None:
    """Replace a file of a set, with its size and its hash."""

    def record(tree: dict[str, Any]) -> None:
        (file,) = [file for shard in tree["shards"] for file in shard["files"] if file["name"] == name]
        file |= {"num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    (path / name).write_bytes(content)
    forge(path, record)


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=True)
    return stream.getvalue()


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.place,)


def huge_header() -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "|u1", "fortran_order": False, "shape": (10**15, 8, 8, 1)})
    return stream.getvalue()


def test_a_sound_set_is_read(prepared: PreparedSet) -> None:
    split = open_split(prepared, "train")
    assert split.num_samples == prepared.num_train
    forge(Path(prepared.path), lambda tree: None)
    assert open_split(prepared, "train").num_samples == prepared.num_train
    assert store.verify(Path(prepared.path)) == ()


@pytest.mark.parametrize("kind", ["images", "labels"])
def test_an_array_of_objects_is_refused_and_none_of_them_is_made(
    prepared: PreparedSet, tmp_path: Path, kind: str
) -> None:
    evil = np.array([Evil(tmp_path / "pwned")] * 3, dtype=object)
    plant(Path(prepared.path), f"train/00000.{kind}.npy", npy(evil))
    with refused(None, prepared.path, f"00000.{kind}.npy", kind=RunError):
        open_split(prepared, "train")
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train/00000.images.npy", huge_header(), "is not an array of numbers"),
        ("train/00000.images.npy", b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 9_000, "is not an array of numbers"),
        ("train/00000.images.npy", b"", "is not an array of numbers"),
        ("train/00000.images.npy", npy(np.zeros((5, 8, 8, 1), np.uint8)), r"holds uint8 \(5, 8, 8, 1\), not uint8"),
        ("train/00000.images.npy", npy(np.zeros((5, 8, 8, 1), np.float64)), "holds float64"),
        ("train/00000.labels.npy", npy(np.zeros(5, np.int64)), r"holds int64 \(5,\), not int64"),
    ],
)
def test_arrays_that_are_not_what_the_manifest_says_are_refused(
    prepared: PreparedSet, name: str, content: bytes, message: str
) -> None:
    plant(Path(prepared.path), name, content)
    with pytest.raises(RunError, match=message) as refused:
        open_split(prepared, "train")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("label", [-1, -100, 10, 2**40])
def test_labels_of_no_class_are_refused(prepared: PreparedSet, label: int) -> None:
    path = Path(prepared.path)
    labels = np.load(path / "test/00000.labels.npy")
    labels[-1] = label
    plant(path, "test/00000.labels.npy", npy(labels))
    with refused(None, "test", "10", kind=RunError):
        open_split(prepared, "test")


def rename(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda tree: tree["shards"][0]["files"][0].update(name=name)


@pytest.mark.parametrize(
    "change",
    [
        *(
            rename(name)
            for name in ("../x.npy", "/etc/passwd", "train/../../00000.images.npy", "train/00000.images.npy\n")
        ),
        lambda tree: tree.update(image_shape=[10**9, 10**9, 1]),
        lambda tree: tree.update(image_shape=[8, 8, 10**9]),
        lambda tree: tree.update(image_shape=[-8, 8, 1]),
        lambda tree: tree.update(mean=[]),
        lambda tree: tree["class_counts"].pop("test"),
        lambda tree: tree["class_counts"]["test"].append(10**9),
        lambda tree: tree["shards"][0].update(num_samples=-1),
        lambda tree: tree["shards"][0].update(num_samples=10**12),
        lambda tree: tree.update(surprise=1),
    ],
)
def test_manifests_that_reach_out_or_do_not_add_up_are_set_aside(
    prepared: PreparedSet, tmp_path: Path, change: Callable[[dict[str, Any]], None], caplog: pytest.LogCaptureFixture
) -> None:
    forge(Path(prepared.path), change)
    assert store.find(tmp_path, KEY) is None
    assert "is damaged" in caplog.text
    with pytest.raises(RunError):
        open_split(prepared, "train")


@pytest.mark.parametrize("name", ["train", "manifest.json", "rejected.jsonl", "test/00000.labels.npy"])
def test_links_are_not_followed(
    prepared: PreparedSet, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    place = Path(prepared.path) / name
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    assert store.find(tmp_path, KEY) is None
    assert "is a link" in caplog.text or "is not a file" in caplog.text
    with pytest.raises(RunError):
        open_split(prepared, "train")


def test_what_is_left_of_a_set_holds_no_part_of_a_file(tmp_path: Path) -> None:
    """A worker may be writing while its set is left to the next preparation."""
    with store.temporary(tmp_path, KEY) as directory:
        part = directory / "train" / f"00000.images.npy.0{TEMPORARY_SUFFIX}"
        part.write_bytes(b"half")
        (directory / "train" / "00001.images.npy").write_bytes(b"whole")
        store.leave_to_next(tmp_path, KEY, directory, ["{}"])
    with store.temporary(tmp_path, KEY) as directory:
        assert store.read_finished_lines(directory) == ["{}"]
        assert [path.name for path in (directory / "train").iterdir()] == ["00001.images.npy"]


def publish_partitions(home: Path) -> Path:
    """Two partitions, one of them after a worker that was killed had begun it."""
    with store.temporary(home, KEY, (PARTITIONS,)) as directory:
        partitions = []
        for name in ("test", "train"):
            file = directory / PARTITIONS / name / "deeper" / "rows.tmp"
            file.parent.mkdir(parents=True)
            file.write_text(name)
            entry = {"name": str(file.relative_to(directory)), "num_bytes": len(name), "sha256": sha256_of(file)}
            partitions.append({"name": name, "files": [entry]})
        (directory / PARTITIONS / f"train.0{TEMPORARY_SUFFIX}").mkdir()
        (directory / PARTITIONS / f"train.0{TEMPORARY_SUFFIX}" / "half").touch()
        shared: dict[str, Any] = {"format_version": FORMAT_VERSION, "key": KEY, "provenance": {}}
        facts = READ(**shared, fingerprint="", partitions=partitions)
        facts = facts.model_copy(update={"fingerprint": facts.content()})
        return store.publish(home, directory, facts, ())


def test_partitions_are_a_set_of_their_own_kind(tmp_path: Path) -> None:
    path = publish_partitions(tmp_path)
    assert path == publish_partitions(tmp_path), "the set of the one that was faster"
    assert sorted(each.name for each in (path / PARTITIONS).iterdir()) == ["test", "train"]
    facts = store.find_as(tmp_path, KEY, READ)
    assert facts is not None
    prepared = facts.to_prepared(path, reused=True, seconds=0.0)
    assert (prepared.num_partitions, prepared.num_files, prepared.num_bytes) == (2, 2, 9)
    assert store.verify(path, READ) == ()
    (path / PARTITIONS / "test" / "deeper" / "rows.tmp").write_text("tost")
    assert "has sha256" in store.verify(path, READ)[0]
    assert store.find_as(tmp_path, KEY, READ) is not None
    assert store.find_as(tmp_path, KEY, READ, check_content=True) is None, "set aside"
    assert not path.exists()


@pytest.mark.parametrize("name", ["partitions/../../x", "/etc/passwd", "train/x", ""])
def test_a_partition_has_no_file_elsewhere(name: str) -> None:
    with pytest.raises(ValueError, match="leads out"):
        manifest.PartitionFile(name=name, num_bytes=1, sha256="")
