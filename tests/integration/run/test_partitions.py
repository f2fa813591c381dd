"""Data of own Lightning code that Dask workers prepare by partitions: in parallel, once, whatever is killed."""

import json
import os
import signal
import threading

import pytest

from paceline.conf.config import Limits
from paceline.conf.environment import Environment
from paceline.conf.lightning import Lightning
from paceline.tasks.data.prepare import store
from paceline.tasks.data.prepare.manifest import PartitionsManifest
from paceline.tasks.errors import InputError, RunError
from paceline.tasks.train.launch.module_data import prepare_partitions
from paceline.tasks.train.prefect_tasks import prepare_module_partitions
from tests.support.own_lightning import PACKAGE
from tests.support.patience import until
from tests.support.scratch_cluster import ScratchCluster

pytest.importorskip("jsonargparse", reason="LightningCLI needs it; infra/install brings it")

CODE = """
import os
import time
from pathlib import Path

import lightning.pytorch as pl


class Tables(pl.LightningDataModule):
    def __init__(self, place: str, keys: tuple[str, ...] = ("a", "b"), meet: bool = False):
        super().__init__()
        self.place, self.keys, self.meet = Path(place), keys, meet

    def partitions(self):
        return self.keys

    def prepare_partition(self, key, directory):
        (self.place / f"{key}.{os.getpid()}").touch()
        while self.meet and not all(list(self.place.glob(f"{other}.*")) for other in self.keys):
            time.sleep(0.01)
        if (self.place / f"stuck-{key}").exists():
            (directory / "half.txt").write_text("half")
            (self.place / "worker").write_text(str(os.getppid()))
            time.sleep(600)
        if (self.place / f"broken-{key}").exists():
            while not (self.place / "progress").exists():  # of the other one
                time.sleep(0.01)
            raise ValueError("no such table")
        if not (self.place / f"empty-{key}").exists():
            (directory / "deeper").mkdir()
            (directory / "deeper" / "rows.txt").write_text(key * 3)
"""


@pytest.fixture(scope="module")
def cluster():
    with ScratchCluster(2) as made:
        yield made


class Preparation:
    """A DataModule whose partitions do what files in a directory ask for, and its preparation in a home of its own."""

    def __init__(self, address, directory):
        self.address, self.home = address, directory / "home"
        self.code, self.place = directory / "code", directory / "place"
        self.code.mkdir()
        self.place.mkdir()
        (self.code / "tables.py").write_text(CODE)

    def run(self, **arguments):
        data = {"class_path": "tables.Tables", "init_args": {"place": str(self.place), **arguments}}
        module = Lightning(settings={"model": {}, "data": data}, code=str(self.code), has_partitions=True)
        done = []

        def on_progress(number, total, num_bytes):
            done.append((number, total, num_bytes))
            (self.place / "progress").touch()

        prepared = prepare_partitions(module, str(self.code), self.home, self.address, on_progress)
        assert store.find_as(self.home, prepared.key, PartitionsManifest) is not None
        assert store.verify(prepared.directory.parent, PartitionsManifest) == ()
        assert self.entries() == [prepared.directory.parent.name]
        return prepared, done

    def entries(self):
        return sorted(path.name for path in (self.home / "prepared").iterdir())

    def num_tries(self, key):
        return len(list(self.place.glob(f"{key}.*")))


@pytest.fixture
def preparation(cluster, tmp_path):
    return Preparation(cluster.address, tmp_path)


@pytest.mark.slow
def test_two_workers_prepare_at_the_same_time_and_once(preparation):
    first, done = preparation.run(meet=True)  # each waits until the other one has started
    assert done == [(1, 2, 3), (2, 2, 6)]
    assert (first.num_partitions, first.num_files, first.num_bytes, first.reused) == (2, 2, 6, False)
    texts = {path.parent.parent.name: path.read_text() for path in first.directory.rglob("*.txt")}
    assert texts == {"a": "aaa", "b": "bbb"}
    again, done = preparation.run(meet=True)
    assert (again.path, again.fingerprint, again.reused, done) == (first.path, first.fingerprint, True, [])
    relative = os.path.relpath(preparation.place)  # the workers have the same current directory
    assert preparation.run(meet=True, place=relative)[0].reused
    (preparation.code / "unused.py").write_text("x = 1\n")
    assert preparation.run(meet=True)[0].reused, "the class does not import that module"
    assert (preparation.num_tries("a"), preparation.num_tries("b")) == (1, 1)


@pytest.mark.slow
def test_a_killed_worker_costs_its_partition_alone(preparation):
    stuck, worker = preparation.place / "stuck-a", preparation.place / "worker"
    stuck.touch()

    def kill():
        pid = until(lambda: worker.exists() and worker.read_text(), "worker that is stuck")
        stuck.unlink()
        os.kill(int(pid), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    prepared, _ = preparation.run()
    thread.join()
    assert preparation.num_tries("a") == 2
    assert sorted(path.name for path in prepared.directory.rglob("*.txt")) == ["rows.txt", "rows.txt"]


@pytest.mark.slow
def test_a_failure_names_its_partition_and_finished_ones_are_not_repeated(preparation):
    broken, empty = preparation.place / "broken-b", preparation.place / "empty-b"
    broken.touch()
    with pytest.raises(RunError, match=r"prepare_partition\('b'\) raised ValueError \(no such table\) in .*tables\.py"):
        preparation.run(meet=True)
    assert all(name.startswith(".unfinished-") for name in preparation.entries())
    broken.rename(empty)
    with pytest.raises(InputError, match=r"prepare_partition\('b'\) wrote nothing") as caught:
        preparation.run(meet=True)
    assert caught.value.hint
    empty.unlink()
    prepared, _ = preparation.run(meet=True)
    assert prepared.num_partitions == 2
    assert (preparation.num_tries("a"), preparation.num_tries("b")) == (1, 3)


@pytest.mark.slow
def test_partitions_that_would_fill_the_disk_are_refused_after_the_first(preparation):
    data = {"class_path": "tables.Tables", "init_args": {"place": str(preparation.place)}}
    module = Lightning(settings={"model": {}, "data": data}, code=str(preparation.code), has_partitions=True)
    places = str(preparation.code), str(preparation.home), preparation.address
    with pytest.raises(RunError, match=r"needs about 0\.00 GiB \(1 further partitions 0\.00\)") as caught:
        prepare_module_partitions.fn(module, *places, Limits(min_free_gib=1e6))
    assert caught.value.setting == "limits.min_free_gib"


@pytest.mark.slow
def test_a_run_trains_on_what_was_prepared_and_a_prediction_reuses_it(paceline, tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    settings = ["model.class_path=prose.gpt.GPT", "model.init_args.width=16", "data.class_path=prose.parts.Topics"]
    trainer = ["trainer.max_steps=3", "trainer.limit_val_batches=1", "trainer.log_every_n_steps=1"]
    process = paceline(
        "run", "lightning", "--code", str(PACKAGE), "--json", *settings, *trainer, "speedup.max_seconds=3"
    )
    out, said = process.communicate(timeout=200)
    assert process.returncode == 0, said
    summary = json.loads(out.splitlines()[-1])
    partitions = summary["partitions"]
    assert (partitions["num_partitions"], partitions["num_files"], partitions["reused"]) == (2, 2, False)
    assert partitions["num_bytes"] > 40_000
    assert summary["speedup"]["ratio"] > 0
    process = paceline("predict", summary["run_id"], "trainer.limit_predict_batches=1", "--json")
    out, said = process.communicate(timeout=200)
    assert process.returncode == 0, said
    assert json.loads(out.splitlines()[-1])["num_samples"] == 32
    assert [path.name for path in (Environment().root / "prepared").iterdir()] == [partitions["key"][:16]]
    assert "Reused 2 partitions" in said
