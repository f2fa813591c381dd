"""Data on an S3-compatible store: a real server, real workers, and a way between them that breaks."""

import json
import os
import re
import time
from pathlib import Path

import dask
import numpy as np
import pytest
import s3fs
import zarr
from mlflow.tracking import MlflowClient
from PIL import Image

from paceline.conf.data import Data
from paceline.conf.load import DASK_SETTINGS
from paceline.tasks.cluster.client import connect
from paceline.tasks.data.decode.pixels import read_pixels
from paceline.tasks.data.listing import SPLITS
from paceline.tasks.data.prepare import dask_graph as graph
from paceline.tasks.data.prepare import store
from paceline.tasks.data.sources import registry as source
from paceline.tasks.data.storage import read_files as reading
from paceline.tasks.errors import InputError, OutsideError, SourceError
from tests.support.archives import make_shards
from tests.support.clips import make_clips
from tests.support.jobs import set_environment, two_workers
from tests.support.object_store import SECRET, USER, object_store
from tests.support.patience import until
from tests.support.pictures import make_pictures
from tests.support.refusals import refused
from tests.support.scratch_cluster import ScratchCluster
from tests.support.signals import make_sounds

NUM_PICTURES = 120
ODD = "a b#1?x=%20&+\u00fc\u4e2d'.png"
TIMES = {"503": 1, "truncate": 1, "reset": 2}
"""How often an object is to fail until it is asked for again and counted; after a reset aiohttp asks once by itself."""


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Two classes of real image files, some damaged."""
    root = tmp_path_factory.mktemp("pictures")
    make_pictures(root)
    return root


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    """The store, which this process and all that it starts know from the environment."""
    with object_store() as made, pytest.MonkeyPatch.context() as patch:
        for name, value in made.environment.items():
            patch.setenv(name, value)
        patch.setenv("PACELINE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield made
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture(autouse=True)
def _undisturbed(s3):
    s3.way.clear()


@pytest.fixture(scope="module")
def workers(s3):
    """Two processes."""
    with two_workers() as address:
        yield address


@pytest.fixture(scope="module")
def root(s3, pictures):
    """The pictures on the store."""
    return s3.fill("pictures", pictures)


@pytest.fixture(scope="module")
def few(pictures, tmp_path_factory):
    """A fifth of them, and one with an odd name."""
    directory = tmp_path_factory.mktemp("few")
    for path in pictures.glob("*/00*"):
        (directory / path.parent.name).mkdir(exist_ok=True)
        (directory / path.parent.name / path.name).hardlink_to(path)
    (directory / "light" / ODD).write_bytes(next(pictures.glob("light/001.*")).read_bytes())
    return directory


@pytest.fixture
def nothing_cached(workers):
    """On this host, where nobody is at work any more for a preparation that has failed."""
    with connect(workers) as client:
        until(lambda: not any(client.run(num_at_work).values()), "rest")
    for path in copies():
        path.unlink()


def num_at_work(dask_worker):
    return len(dask_worker.state.executing) + len(dask_worker.state.ready)


def copies():
    return {path for path in Path(os.environ["PACELINE_CACHE"]).rglob("*") if path.is_file() and len(path.name) > 60}


def folder(root, image_size=16, **changes):
    return Data(source="folder", root=str(root), image_size=image_size, max_rejected_fraction=0.2, **changes)


def prepare(data, home, address):
    return graph.prepare(source.list_samples(data), data, home, address)


def rejected_of(prepared):
    lines = (Path(prepared.path) / "rejected.jsonl").read_text().splitlines()
    return {entry["path"]: entry["reason"] for entry in map(json.loads, lines)}


@pytest.fixture(scope="module")
def from_disk(pictures, workers, tmp_path_factory):
    """The set of the same files on a disk, by size."""
    home = tmp_path_factory.mktemp("from-disk")

    def prepared(image_size=16):
        return prepare(folder(pictures, image_size), home, workers)

    return prepared


def test_a_store_gives_the_same_set_as_a_disk(s3, root, workers, from_disk, changed_environment, tmp_path):
    listing = source.list_samples(folder(root))
    assert s3.way.gets == [], "the flow's process reads names alone"
    changed_environment({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"})  # from here on only the workers know where it is
    prepared = graph.prepare(listing, folder(root), tmp_path, workers)
    changed_environment(s3.environment)
    assert prepared.fingerprint == from_disk().fingerprint
    assert rejected_of(prepared) == rejected_of(from_disk())
    assert store.verify(Path(prepared.path)) == ()
    assert len(s3.way.gets) == prepared.reads.num_fetched == NUM_PICTURES
    assert (prepared.reads.num_retries, prepared.reads.num_cached) == (0, 0)
    assert prepare(folder(root), tmp_path, workers).reused
    assert SECRET not in (Path(prepared.path) / "manifest.json").read_text()


@pytest.mark.usefixtures("nothing_cached")
@pytest.mark.parametrize("fault", TIMES)
def test_what_goes_wrong_on_the_way_is_asked_for_again(s3, root, workers, from_disk, tmp_path, fault):
    times = TIMES[fault]
    chosen = {
        f"/pictures/images/{sample.path}" for sample in source.list_samples(folder(root)).train[:64:4] if sample.size
    }
    s3.way.fault = lambda number, path: fault if path in chosen and s3.way.gets.count(path) <= times else None
    prepared = prepare(folder(root), tmp_path, workers)
    assert prepared.fingerprint == from_disk().fingerprint
    assert rejected_of(prepared) == rejected_of(from_disk())
    assert s3.way.num_faults == times * len(chosen) > 10
    assert prepared.reads.num_retries == len(chosen)
    assert len(s3.way.gets) == NUM_PICTURES + s3.way.num_faults


@pytest.mark.usefixtures("nothing_cached")
def test_what_never_comes_whole_ends_the_preparation(s3, root, workers, tmp_path, monkeypatch):
    monkeypatch.setattr(graph, "RETRIES", 0)
    s3.way.fault = lambda number, path: "truncate" if path.endswith("/000.jpg") else None
    with pytest.raises(OutsideError, match=r"(dark|light)/000\.jpg.*\b5\b"):
        prepare(folder(root), tmp_path, workers)
    assert not list((tmp_path / "prepared").glob("[!.]*"))


def test_as_many_are_on_their_way_together_as_are_allowed(s3, root, monkeypatch):
    monkeypatch.setenv("PACELINE_CACHE_GIB", "0")
    listing = source.list_samples(folder(root))
    s3.way.hold_until = reading.WAVE_FILES
    contents = list(reading.read_files(root, reading.files_of(listing.train)))
    assert s3.way.most_at_once == reading.WAVE_FILES == 64
    assert len(contents) == len(listing.train)


@pytest.mark.usefixtures("nothing_cached")
def test_what_was_read_once_is_read_from_the_cache_for_another_size(s3, root, workers, from_disk, tmp_path):
    first = prepare(folder(root), tmp_path, workers)
    assert first.reads.num_fetched == NUM_PICTURES
    s3.way.clear()
    larger = prepare(folder(root, 24), tmp_path, workers)
    assert s3.way.gets == []
    assert (larger.reads.num_fetched, larger.reads.num_cached) == (0, NUM_PICTURES)
    assert larger.fingerprint == from_disk(24).fingerprint


@pytest.mark.usefixtures("nothing_cached")
def test_a_damaged_copy_is_noticed_and_fetched_again(s3, root, workers, from_disk, tmp_path):
    prepare(folder(root), tmp_path, workers)
    altered, torn, *_ = sorted(copies())
    content = bytearray(altered.read_bytes())
    content[-1] ^= 1
    altered.write_bytes(content)
    os.truncate(torn, torn.stat().st_size // 2)
    s3.way.clear()
    again = prepare(folder(root, 24), tmp_path, workers)
    assert (again.reads.num_fetched, again.reads.num_damaged) == (2, 2)
    assert len(s3.way.gets) == 2
    assert again.fingerprint == from_disk(24).fingerprint


@pytest.mark.parametrize("spoilt", ["used", "entry"])
def test_a_cache_that_fails_is_done_without(s3, root, tmp_path, monkeypatch, caplog, spoilt):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    files = list(reading.files_of(source.list_samples(folder(root)).test))
    first = list(reading.read_files(root, files))
    place = copies().pop() if spoilt == "entry" else tmp_path / f"user-{os.geteuid()}" / "used"
    place.unlink()
    place.mkdir()
    for path in copies():
        path.unlink()
    with reading.count_reads() as tally:
        assert list(reading.read_files(root, files)) == first
    assert tally.reads.num_fetched == len(files)
    assert f"cannot {'write to' if spoilt == 'used' else 'read'} the cache (" in caplog.text


def test_an_object_that_changed_since_it_was_listed_is_noticed(s3, few, workers, tmp_path):
    root = s3.fill("changed", few)
    data = folder(root)
    listing = source.list_samples(data)
    changed = listing.train[0].path
    s3.hands.pipe(f"changed/images/{changed}", b"another")
    with pytest.raises(SourceError, match=re.escape(changed)):
        graph.prepare(listing, data, tmp_path, workers)
    assert prepare(data, tmp_path, workers).num_rejected == 2 + 1, "listed anew"


def test_single_objects_that_are_gone_or_denied_are_counted_and_listed(s3, few, workers, tmp_path):
    root = s3.fill("single", few)
    data = folder(root)
    listing = source.list_samples(data)
    gone, denied = (sample.path for sample in listing.train[:2])
    s3.hands.rm(f"single/images/{gone}")
    s3.way.fault = lambda number, path: "403" if path.endswith(f"/{denied}") else None
    reasons = rejected_of(graph.prepare(listing, data, tmp_path, workers))
    assert len(reasons) == 2 + 2
    assert reasons[gone] == "the store has it no more"
    assert reasons[denied] == "the store denies access (AccessDenied)"


def make_pairs(root):
    """Images with masks."""
    rng = np.random.default_rng(0)
    for kind in ("images", "masks"):
        (root / kind / "day").mkdir(parents=True)
        for number in range(20):
            size = (12 + number, 12 + number)
            shape = (*size, 3) if kind == "images" else size
            pixels = rng.integers(0, 256 if kind == "images" else 3, shape, dtype=np.uint8)
            Image.fromarray(pixels).save(root / kind / "day" / f"{number:02d}.png")
    (root / "classes.txt").write_text("sky\nland\nsea\n")


def make_arrays(root):
    """Tables of images, in files of NumPy; of Parquet there is more to be read around the rows."""
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (60, 12, 14, 3), dtype=np.uint8), np.arange(60) % 3
    root.mkdir()
    np.savez_compressed(root / "train.npz", images=images[:40], labels=labels[:40])
    np.savez(root / "test.npz", images=images[40:], labels=labels[40:])


def make_stores(root):
    """The same tables as Zarr stores, a chunk of some images an object."""
    make_arrays(root)
    for path in root.glob("*.npz"):
        with np.load(path) as arrays:
            group = zarr.open_group(path.with_suffix(".zarr"), mode="w")
            group.create_array("images", data=arrays["images"], chunks=(8, 12, 14, 3))
            group.create_array("labels", data=arrays["labels"])
        path.unlink()


KINDS = {
    "pairs": (make_pairs, {}),
    "arrays": (make_arrays, {}),
    "zarr": (make_stores, {"source": "arrays"}),
    "webdataset": (make_shards, {}),
    "signals": (lambda root: make_sounds(root, per_class=9), {"image_size": 32}),
    "clips": (lambda root: make_clips(root, per_class=10), {"num_frames": 4}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_can_lie_on_a_store(s3, tmp_path, kind):
    """Listed and read as from a disk, pixel by pixel, and the same is rejected."""
    make, settings = KINDS[kind]
    make(tmp_path / "files")
    found = {}
    for root in (s3.fill(f"kind-{kind}", tmp_path / "files"), tmp_path / "files"):
        data = Data(**{"source": kind, "root": str(root), "image_size": 16, "max_rejected_fraction": 0.5} | settings)
        listing = source.list_samples(data)
        found[root] = {
            split: read_pixels(listing.origin, listing.split(split), data.image_size, data.num_channels)
            for split in SPLITS
        }
    from_store, from_disk = found.values()
    for split in SPLITS:
        assert from_store[split].positions == from_disk[split].positions
        assert from_store[split].reasons == from_disk[split].reasons
        np.testing.assert_array_equal(from_store[split].images_NHWC, from_disk[split].images_NHWC)
    assert len(from_disk["train"].positions) >= 6


WRONG = {
    "no such bucket": ({}, "s3://nowhere/x", ("data.root", "nowhere")),
    "no such folder": ({}, "s3://pictures/x", ("data.root",)),
    "nobody": (
        {"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None},
        "s3://pictures/images",
        ("data.root", "AWS_PROFILE"),
    ),
    "no such profile": (
        {"AWS_PROFILE": "absent"},
        "s3://pictures/images",
        ("data.root", "absent", "AWS_PROFILE"),
    ),
    "nobody there": (
        {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_MAX_ATTEMPTS": "1"},
        "s3://pictures/images",
        ("data.root", "AWS_ENDPOINT_URL"),
    ),
    "no address": (
        {"AWS_ENDPOINT_URL": "nonsense"},
        "s3://pictures/images",
        ("data.root", "nonsense"),
    ),
    "no size": (
        {"PACELINE_CACHE_GIB": "much"},
        "s3://pictures/images",
        ("PACELINE_CACHE_GIB", "PACELINE_CACHE_GIB=much"),
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_a_store_is_told_on_one_line(root, case, changed_environment):
    environment, asked, (setting, *data) = WRONG[case]
    changed_environment(environment)
    with refused(setting, *data, *([f"data.root={asked}"] if setting == "data.root" else [])):
        source.list_samples(folder(asked))


def test_a_user_whom_the_store_does_not_know_is_told(s3, root):
    with s3.asking_who(), refused("data.root", root, "InvalidAccessKeyId"):
        source.list_samples(folder(root))


@pytest.mark.usefixtures("nothing_cached")
def test_a_worker_whom_the_store_does_not_let_in_is_named(root, workers, tmp_path):
    """Each host has credentials of its own, or none."""
    names = (*USER, "AWS_EC2_METADATA_DISABLED")
    with connect(workers) as client:
        before = next(iter(client.run(lambda: {name: os.environ.get(name) for name in names}).values()))
        client.run(known_as, dict.fromkeys(USER) | {"AWS_EC2_METADATA_DISABLED": "true"})
        try:
            with pytest.raises(InputError, match=r"there are no credentials .* \(seen from host \S+\)$"):
                prepare(folder(root, 20), tmp_path, workers)
        finally:
            client.run(known_as, before)


def known_as(variables):
    set_environment(variables)
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def changed_environment(monkeypatch):
    """Sets and removes variables; what was opened with others before is forgotten."""

    def change(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        s3fs.S3FileSystem.clear_instance_cache()

    yield change
    s3fs.S3FileSystem.clear_instance_cache()


def test_the_program_refuses_a_wrong_store_before_any_work(s3, program):
    process = program("run", "folder", "data.root=s3://nowhere/x")
    out, said = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, ""), said
    assert said.startswith("error: data.root=s3://nowhere/x: the store has no bucket nowhere\nhint: ")
    assert [line.partition(":")[0] for line in said.splitlines()] == ["error", "hint"]


SMALL = [
    "data.image_size=16",
    "model.width=8",
    "recipe.num_epochs=4",
    "recipe.warmup_epochs=0",
    "speedup.baseline=none",
]


@pytest.fixture(scope="module")
def learned(root, call):
    """The summary of a run of the program on the store."""
    return call("run", "folder", f"data.root={root}", *SMALL)


@pytest.mark.slow
def test_the_program_learns_and_predicts_from_a_store(s3, root, call, learned, tmp_path, monkeypatch):
    dataset = learned["dataset"]
    assert dataset["num_train"] + dataset["num_validation"] + dataset["num_test"] == NUM_PICTURES - 8
    run = MlflowClient(learned["tracking_uri"]).get_run(learned["run_id"])
    counted = {name: value for name, value in run.data.metrics.items() if name.startswith("data/")}
    assert counted["data/num_fetched"] + counted["data/num_cached"] == NUM_PICTURES
    assert counted["data/num_retries"] == 0
    findings = call("doctor", "data.source=folder", f"data.root={root}")["findings"]
    assert [one["found"] for one in findings if one["check"] == "data on workers"] == [f"{root}, reached by all"]
    s3.way.clear()
    predicted = call("predict", learned["run_id"], root, "--out", tmp_path / "out")
    assert (predicted["num_samples"], predicted["num_rejected"]) == (NUM_PICTURES - 8, 8)
    assert s3.way.gets == [], "all are in the cache"
    assert predicted["reads"]["num_fetched"] == 0
    assert predicted["reads"]["num_cached"] > NUM_PICTURES, "the first ones also for the parity"
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cold"))
    predicted = call("predict", learned["run_id"], root, "--out", tmp_path / "cold-out")
    told = MlflowClient(learned["tracking_uri"]).get_run(predicted["run_id"]).data.metrics
    assert told["data/num_fetched"] == len(s3.way.gets) == NUM_PICTURES, "those of the parity too"
    assert told["data/num_cached"] > 0, "the parity's, once more"


@pytest.mark.slow
def test_credentials_of_a_store_are_nowhere(learned):
    time.sleep(3)  # Prefect's server writes behind
    places = [Path(os.environ[name]) for name in ("PACELINE_HOME", "PREFECT_HOME", "PACELINE_CACHE")]
    files = [path for place in places for path in place.rglob("*") if path.is_file()]
    assert len(files) > 20
    planted = [SECRET, USER["AWS_ACCESS_KEY_ID"]]
    assert [path for path in files if any(one.encode() in path.read_bytes() for one in planted)] == []
    assert not any(one in json.dumps(learned) for one in planted)


@pytest.mark.slow
def test_workers_beside_the_store(s3, root, call, from_disk, monkeypatch):
    """As infra/README.md has them: DASK_CONFIG names the folder conf/dask and nothing else."""
    monkeypatch.setenv("DASK_CONFIG", str(DASK_SETTINGS.parent))
    with ScratchCluster(2) as cluster:
        with connect(cluster.address) as client:
            told = client.run(lambda: (dict(os.environ), dask.config.get("distributed.worker.profile.enabled")))
        asked = [f"data.root={root}", "cluster.kind=address", f"cluster.address={cluster.address}", *SMALL]
        summary = call("run", "folder", *asked, "cluster.tls=off")
    for environment, has_profiler in told.values():
        assert not has_profiler, "dask.yaml is read too"
        assert (environment["AWS_MAX_ATTEMPTS"], environment["PACELINE_CACHE_GIB"]) == ("8", "32")
        assert environment["PACELINE_CACHE"] == os.environ["PACELINE_CACHE"], "a site's own says more"
    assert summary["dataset"]["fingerprint"] == from_disk().fingerprint
