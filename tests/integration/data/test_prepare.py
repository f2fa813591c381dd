"""Preparation on a real Dask cluster of two processes."""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from distributed import LocalCluster
from PIL import Image

from paceline.conf.data import Data
from paceline.tasks import progress as display
from paceline.tasks.data.loading.split_reader import open_split
from paceline.tasks.data.prepare import chunks, store
from paceline.tasks.data.prepare import dask_graph as graph
from paceline.tasks.data.prepare.chunks import ChunkPlanner
from paceline.tasks.data.prepare.shard import Chunk
from paceline.tasks.data.sources import registry as source
from paceline.tasks.errors import RunError
from paceline.tasks.records.data import PreparedSet
from tests.support.jobs import two_workers
from tests.support.photographs import save_photographs
from tests.support.refusals import refused


def start(num_workers: int, processes: bool = True) -> LocalCluster:
    return LocalCluster(
        n_workers=num_workers,
        threads_per_worker=1,
        processes=processes,
        host="127.0.0.1" if processes else None,
        dashboard_address=":0",  # None still claims port 8787 for the scheduler's HTTP server
    )


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with start(2) as cluster:
        yield cluster.scheduler_address


def prepare(data: Data, home: Path, address: str, **more: Any) -> PreparedSet:
    return graph.prepare(source.list_samples(data), data, home, address, **more)


def leftovers(home: Path) -> list[Path]:
    return [*(home / "prepared").glob(".tmp-*"), *(home / "prepared").rglob("*.tmp")]


def save_images(root: Path, per_class: int = 6) -> Path:
    rng = np.random.default_rng(2)
    for name in ("cat", "dog"):
        (root / name).mkdir(parents=True)
        for number in range(per_class):
            pixels = rng.integers(0, 256, (20 + number, 30, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number}.png")
    return root


def save_mixed(root: Path) -> None:
    pixels = np.random.default_rng(3).integers(0, 256, (24, 18, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    for mode in ("L", "RGBA", "P"):
        image.convert(mode).save(root / f"mode{mode}.png")
    Image.fromarray(pixels[..., 0].astype(np.uint16) * 257).save(root / "sixteen.png")
    image.convert("CMYK").save(root / "cmyk.jpg")
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(root / "turned.jpg", exif=exif)
    image.save(root / "moving.gif", save_all=True, append_images=[image.rotate(90, expand=False)])


def folder(root: Path | str, **changes: Any) -> Data:
    return Data(source="folder", root=str(root), image_size=16, **changes)


@pytest.mark.parametrize("name", ["digits", "rotated_digits"])
def test_embedded_digits(tmp_path: Path, address: str, name: Any) -> None:
    progress: list[tuple[int, int]] = []
    data = Data(source=name)
    prepared = prepare(data, tmp_path, address, on_progress=lambda done, total: progress.append((done, total)))
    total = prepared.num_train + prepared.num_validation + prepared.num_test
    assert progress[-1] == (total, total)
    train = open_split(prepared, "train")
    pixels = train.gather(np.arange(train.num_samples)) / 255
    assert prepared.mean == pytest.approx((pixels.mean(),))
    assert prepared.std == pytest.approx((pixels.std(),))
    assert prepared.class_counts["train"] == tuple(np.bincount(train.labels_N))
    assert (train.targets_NT is None) == (name == "digits")
    assert store.verify(Path(prepared.path)) == ()
    again = prepare(data, tmp_path, address)
    assert again.reused
    assert not prepared.reused
    assert again.model_dump(exclude={"reused", "seconds"}) == prepared.model_dump(exclude={"reused", "seconds"})


def test_mixed_and_corrupt_images(tmp_path: Path, address: str) -> None:
    root = save_images(tmp_path / "images")
    save_mixed(root / "cat")
    good = (root / "dog" / "5.png").read_bytes()
    (root / "dog" / "cut.png").write_bytes(good[: len(good) // 2])
    (root / "dog" / "zero.jpg").write_bytes(b"")
    (root / "dog" / "text.jpg").write_text("no picture")
    (root / "dog" / "notes.txt").write_text("ignored")
    prepared = prepare(folder(root, max_rejected_fraction=0.2, validation_fraction=0.0), tmp_path / "home", address)
    lines = (Path(prepared.path) / "rejected.jsonl").read_text().splitlines()
    rejected = {entry["path"]: entry for entry in map(json.loads, lines)}
    assert set(rejected) == {"dog/cut.png", "dog/zero.jpg", "dog/text.jpg"}
    assert rejected["dog/zero.jpg"]["reason"] == "empty file"
    assert rejected["dog/zero.jpg"]["class_name"] == "dog"
    assert prepared.num_rejected == 3
    assert prepared.ignored == {".txt": 1}
    assert prepared.num_train + prepared.num_test == 12 + 7
    # A reused set is held to the limit too.
    with refused("data.root", "3", "22", "13.6", "data.max_rejected_fraction=0.1"):
        prepare(folder(root, max_rejected_fraction=0.1, validation_fraction=0.0), tmp_path / "home", address)


def test_too_many_rejected(tmp_path: Path, address: str) -> None:
    root = save_images(tmp_path / "images")
    (root / "dog" / "zero.jpg").write_bytes(b"")
    home = tmp_path / "home"
    with refused("data.root", "1", "13", "7.7", "dog/zero.jpg", "data.max_rejected_fraction=0.01") as caught:
        prepare(folder(root), home, address)
    (kept,) = (home / "rejected").iterdir()
    assert str(kept) in str(caught.value)
    assert len(kept.read_text().splitlines()) == 1
    assert list((home / "prepared").iterdir()) == []


def test_a_class_without_a_good_sample(tmp_path: Path, address: str) -> None:
    root = save_images(tmp_path / "images")
    for path in (root / "dog").iterdir():
        path.write_bytes(b"")
    with refused("data.root", "dog"):
        prepare(folder(root, max_rejected_fraction=0.9), tmp_path / "home", address)
    assert list((tmp_path / "home" / "prepared").iterdir()) == []


def test_the_fingerprint_is_of_the_content(tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root = save_images(tmp_path / "images", 20)
    monkeypatch.setattr(chunks, "MAX_FILES", 3)
    two = prepare(folder(root), tmp_path / "two", address)
    with start(1) as cluster:
        one = prepare(folder(root), tmp_path / "one", cluster.scheduler_address)
    assert one.fingerprint == two.fingerprint
    assert (one.mean, one.std) == (two.mean, two.std)
    assert len(open_split(two, "train").images) > 5
    (root / "dog" / "0.png").touch()
    touched = prepare(folder(root), tmp_path / "two", address)
    assert touched.key != two.key
    assert not touched.reused
    assert touched.fingerprint == two.fingerprint
    (root / "dog" / "0.png").unlink()
    fewer = prepare(folder(root), tmp_path / "two", address)
    assert fewer.fingerprint != two.fingerprint
    Image.new("RGB", (9, 9)).save(root / "dog" / "0.png")
    changed = prepare(folder(root), tmp_path / "two", address)
    assert changed.fingerprint not in {two.fingerprint, fewer.fingerprint}


def test_large_training_shards_hold_every_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = save_images(tmp_path / "images", 20)
    monkeypatch.setattr(chunks, "MAX_FILES", 5)
    data = folder(root)
    cut = list(ChunkPlanner(source.list_samples(data), data, tmp_path).chunks())
    assert all({sample.label for sample in chunk.samples} == {0, 1} for chunk in cut if chunk.split == "train")
    assert sum(len(chunk.samples) for chunk in cut) == 40
    assert all(1 <= len(chunk.samples) <= 5 for chunk in cut)


def test_how_many_shards_a_task_writes_changes_nothing(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = save_images(tmp_path / "images", 20)
    (root / "dog" / "zero.jpg").write_bytes(b"")
    (root / "cat" / "text.jpg").write_text("no picture")
    monkeypatch.setattr(chunks, "MAX_FILES", 2)
    found = []
    for number in (1, 2, 12):
        monkeypatch.setattr(chunks, "PORTION_FILES", number)
        prepared = prepare(folder(root, max_rejected_fraction=0.1), tmp_path / f"home{number}", address)
        assert store.verify(Path(prepared.path)) == ()
        rejected = (Path(prepared.path) / "rejected.jsonl").read_text()
        found.append((prepared.fingerprint, prepared.mean, prepared.std, prepared.class_counts, rejected))
    assert found[0] == found[1] == found[2]
    assert found[0][-1].count("\n") == 2


def test_progress_tells_rate_and_time_left(tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(chunks, "MAX_FILES", 5)
    root = save_images(tmp_path / "images", 20)
    said: list[str] = []
    with display.progress_of_samples("prepare", said.append) as show:
        prepare(folder(root), tmp_path / "home", address, on_progress=show)
    assert len(said) > 5
    pattern = r"prepare: \d+ of 40 samples \(\d+%\), [\d,]+ samples/s, 0:00:\d\d left"
    assert all(re.fullmatch(pattern, line) for line in said), said
    assert said[-1].startswith("prepare: 40 of 40 samples (100%)")


def fill_with_links(root: Path, num_files: int) -> Path:
    """Two classes of many small files that are few on the disk."""
    pool = save_images(root / ".pool", 20)
    for name in ("cat", "dog"):
        (root / name).mkdir()
        for number in range(num_files // 2):
            (root / name / f"image{number:06d}.png").hardlink_to(pool / name / f"{number % 20}.png")
    return root


def test_a_listing_is_small(tmp_path: Path) -> None:
    root = fill_with_links(tmp_path / "images", 6_000)
    source.list_samples(folder(root))  # what is loaded once
    tracemalloc.start()
    try:
        listing = source.list_samples(folder(root))
        assert len(listing.sha256) == 64
        now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert listing.num_samples == 6_000
    assert now < 150 * 6_000
    assert peak < 350 * 6_000


@pytest.mark.slow
def test_the_work_at_the_scheduler_does_not_grow_with_the_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the graph, nor what Dask keeps of past messages; every portion that is alive holds its samples' names."""
    monkeypatch.setattr(chunks, "MAX_FILES", 4)
    monkeypatch.setattr(chunks, "PORTION_FILES", 4)

    def num_alive() -> int:
        return sum(type(thing) is Chunk for thing in gc.get_objects())  # isinstance asks some modules' lazy objects

    most = {}
    with two_workers() as address:
        before = num_alive()  # what the cluster of the other tests keeps
        for num_files in (200, 800):
            alive: list[int] = []

            def look(done: int, total: int, alive: list[int] = alive) -> None:
                if done % 80 == 0:
                    alive.append(num_alive() - before)

            root = fill_with_links(tmp_path / f"{num_files}", num_files)
            prepared = prepare(folder(root), tmp_path / "home", address, on_progress=look)
            assert sum(map(sum, prepared.class_counts.values())) == num_files
            most[num_files] = max(alive)
    # Two threads' windows of 8, in the client's hands and in the scheduler's, and the few messages that are kept.
    assert most[800] < 80, most


@pytest.mark.parametrize("damage", ["truncate", "remove", "manifest", "escape", "link"])
def test_damaged_sets_are_set_aside(
    tmp_path: Path, address: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = Data(source="digits")
    first = prepare(data, tmp_path, address)
    path = Path(first.path)
    shard = path / "train" / "00000.images.npy"
    manifest = path / "manifest.json"
    if damage == "truncate":
        os.truncate(shard, 100)
    elif damage == "remove":
        shard.unlink()
    elif damage == "manifest":
        manifest.write_text(manifest.read_text()[:200])
    elif damage == "escape":
        manifest.write_text(manifest.read_text().replace("train/00000.images.npy", "../../secret.npy"))
    else:
        shard.rename(tmp_path / "elsewhere.npy")
        shard.symlink_to(tmp_path / "elsewhere.npy")
    second = prepare(data, tmp_path, address)
    assert not second.reused
    assert second.fingerprint == first.fingerprint
    assert caplog.text.count("is damaged") == 1
    assert len(list((tmp_path / "prepared").glob(".damaged-*"))) == 1
    assert prepare(data, tmp_path, address).reused


def test_verify_notices_a_flipped_bit(tmp_path: Path, address: str) -> None:
    path = Path(prepare(Data(source="digits"), tmp_path, address).path)
    shard = path / "train" / "00000.images.npy"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    (problem,) = store.verify(path)
    assert problem.startswith("train/00000.images.npy has sha256")
    assert prepare(Data(source="digits"), tmp_path, address).reused, "as in every run"
    again = prepare(Data(source="digits"), tmp_path, address, check_content=True)
    assert not again.reused
    assert store.verify(path) == ()
    assert prepare(Data(source="digits"), tmp_path, address, check_content=True).reused


@pytest.mark.parametrize("error", [RuntimeError("boom"), OSError(errno.ENOSPC, "no space left"), KeyboardInterrupt()])
def test_an_interrupted_preparation_leaves_nothing(tmp_path: Path, address: str, error: BaseException) -> None:
    old = prepare(Data(source="digits"), tmp_path, address)

    def interrupt(done: int, total: int) -> None:
        raise error

    with pytest.raises((RunError, KeyboardInterrupt)) as caught:
        prepare(Data(source="digits", image_size=20), tmp_path, address, on_progress=interrupt)
    if isinstance(error, OSError):
        assert "the disk is full" in str(caught.value)
    assert leftovers(tmp_path) == []
    assert prepare(Data(source="digits"), tmp_path, address).fingerprint == old.fingerprint


def test_what_was_finished_before_the_data_failed_is_kept(tmp_path: Path) -> None:
    """A file that is damaged, or a store that lets nobody in, is an error of the input, and may be mended."""
    rng = np.random.default_rng(4)
    for split in ("train", "test"):
        images = rng.integers(0, 256, (60, 8, 8), dtype=np.uint8)
        np.savez(tmp_path / f"{split}.npz", images=images, labels=np.arange(60) % 2)
    data = Data(source="arrays", root=str(tmp_path), image_size=8, validation_fraction=0.1)
    listing, test = source.list_samples(data), tmp_path / "test.npz"
    sound, home = test.read_bytes(), tmp_path / "home"
    test.write_bytes(sound[:500])
    progress: list[int] = []

    def tell(done: int, total: int) -> None:
        progress.append(done)

    with start(1, processes=False) as cluster:
        with refused(None, "test.npz"):
            graph.prepare(listing, data, home, cluster.scheduler_address, on_progress=tell)
        assert leftovers(home) == []
        assert progress == [54, 60], "training and validation, which come first"
        test.write_bytes(sound)
        prepared = graph.prepare(listing, data, home, cluster.scheduler_address, on_progress=tell)
    assert progress == [54, 60, 120], "the test split alone"
    assert store.verify(Path(prepared.path)) == ()


def test_the_faster_process_wins(tmp_path: Path, address: str) -> None:
    data = Data(source="digits")
    raced: list[PreparedSet] = []

    def race(done: int, total: int) -> None:
        if not raced:
            raced.append(prepare(data, tmp_path, address))

    slower = prepare(data, tmp_path, address, on_progress=race)
    assert slower.path == raced[0].path
    assert slower.fingerprint == raced[0].fingerprint
    assert leftovers(tmp_path) == []


def test_stale_directories_are_removed_and_live_ones_kept(tmp_path: Path) -> None:
    with store.temporary(tmp_path, "a" * 64) as live:
        dead = live.with_name(".tmp-dead-1-x")
        dead.mkdir()
        owner = json.loads((live / store.OWNER).read_text())
        (dead / store.OWNER).write_text(json.dumps({**owner, "created": 1.0}))
        foreign = live.with_name(".tmp-foreign-1-x")
        foreign.mkdir()
        (foreign / store.OWNER).write_text(json.dumps({**owner, "host": "another"}))
        old = live.with_name(".tmp-old-1-x")
        old.mkdir()
        os.utime(old, (1, 1))
        assert store.remove_stale(tmp_path) == 2
        assert live.exists()
        assert foreign.exists()
        os.utime(foreign / store.OWNER, (1, 1))
        assert store.remove_stale(tmp_path) == 1
    assert leftovers(tmp_path) == []


def test_an_archive_goes_through_the_same_graph(tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.tasks.data.sources import cifar10

    root = tmp_path / "cifar-10-batches-bin"
    root.mkdir()
    rng = np.random.default_rng(0)
    for name in cifar10.BATCHES:
        labels = rng.permutation(10).astype(np.uint8)[:, None]
        records = np.concatenate([labels, rng.integers(0, 256, (10, 3_072), dtype=np.uint8)], axis=1)
        (root / f"{name}.bin").write_bytes(records.tobytes())
    monkeypatch.setattr(cifar10, "BINARY_BATCH_BYTES", 10 * 3_073)
    prepared = prepare(Data(source="cifar10", root=str(root), image_size=32), tmp_path / "home", address)
    assert (prepared.num_train, prepared.num_validation, prepared.num_test) == (40, 10, 10)
    assert prepared.image_shape == (32, 32, 3)


def test_a_remote_root(tmp_path: Path) -> None:
    root = save_images(tmp_path / "images")
    memory = fsspec.filesystem("memory")
    for path in root.rglob("*.png"):
        memory.pipe(f"/remote/{path.relative_to(root)}", path.read_bytes())
    with start(1, processes=False) as cluster:
        prepared = prepare(folder("memory://remote"), tmp_path / "home", cluster.scheduler_address)
        local = prepare(folder(root), tmp_path / "home", cluster.scheduler_address)
    assert prepared.fingerprint == local.fingerprint


def test_no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.tasks.cluster.client.CONNECT_SECONDS", 1)
    with refused(None, "tcp://127.0.0.1:1", kind=RunError):
        prepare(Data(source="digits"), tmp_path, "tcp://127.0.0.1:1")
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("storage", ["raw", "jpeg"])
def test_photographs_on_any_number_of_threads(tmp_path: Path, address: str, storage: Any) -> None:
    """Workers of one thread each share the cores of their host: one worker has them all, two have half."""
    root = save_photographs(tmp_path / "images", 20)
    (root / "a" / "zero.jpg").write_bytes(b"")
    data = folder(root, stored_size=20, storage=storage, max_rejected_fraction=0.1)
    two = prepare(data, tmp_path / "two", address)
    with start(1, processes=False) as cluster:
        one = prepare(data, tmp_path / "one", cluster.scheduler_address)
    assert (one.fingerprint, one.mean, one.std) == (two.fingerprint, two.mean, two.std)
    assert (one.storage, one.stored_size, one.image_shape, one.num_rejected) == (storage, 20, (16, 16, 3), 1)
    assert store.verify(Path(one.path)) == ()
    assert prepare(data, tmp_path / "one", address).reused
    squares = prepare(data.model_copy(update={"stored_size": "auto", "storage": "auto"}), tmp_path / "one", address)
    assert not squares.reused
    assert not list(Path(squares.path).glob("*/*.shapes.npy"))
    assert leftovers(tmp_path / "one") == []
