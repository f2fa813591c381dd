"""Stages over their time limit, and stages that fail for a moment: all they began is ended, what is done stays done."""

import json
import time
from datetime import datetime
from pathlib import Path

import httpx
import numpy as np
import pytest
from distributed import Client
from mlflow.tracking import MlflowClient
from PIL import Image
from prefect import flow, settings

from paceline.conf.config import Limits
from paceline.conf.data import Data
from paceline.conf.environment import Environment
from paceline.flows.lifecycle.outage import with_retries
from paceline.tasks import deadline
from paceline.tasks.data.prefect_tasks import prepare
from paceline.tasks.data.prepare import chunks, store
from paceline.tasks.data.prepare import dask_graph as graph
from paceline.tasks.data.sources import registry as source
from paceline.tasks.data.storage import read_files as reading
from paceline.tasks.errors import TimeLimitError
from paceline.tasks.metrics_file import FILE
from paceline.tasks.train.launch.coordinator import train_group
from paceline.tasks.train.launch.device_lock import DeviceLock
from paceline.tasks.train.launch.rank_process import running_ranks
from paceline.tasks.train.rank.checkpoint import newest_valid_checkpoint, step_of
from tests.integration.conftest import SMALL
from tests.support.jobs import planted, two_workers
from tests.support.patience import until
from tests.support.refusals import refused

NUM_FILES = 40


def set_reader(delay=0.0, failing=None, tries=None, times=0):
    """On a worker: read files slowly, or fail as a network does.

    Args:
        delay: before each file, seconds.
        failing: end of the path of one file, of which the first `times` reads fail.
        tries: file with a byte for each read of that one, for all workers.
        times: see `failing`.
    """
    original = getattr(reading, "plain_reader", reading._read_local)
    reading.plain_reader = original

    def read(path, file):
        time.sleep(delay)
        if failing and path.endswith(failing):
            with Path(tries).open("ab") as stream:
                stream.write(b".")
            if Path(tries).stat().st_size <= times:
                raise ConnectionError("the server has hung up")
        return original(path, file)

    reading._read_local = read


@pytest.fixture(scope="module")
def workers():
    with two_workers(tls="off") as address, Client(address, set_as_default=False) as client:
        yield address, client


@pytest.fixture
def images(tmp_path, monkeypatch):
    """A folder of small images, cut into shards of four samples, one for each task."""
    monkeypatch.setattr(chunks, "MAX_FILES", 4)
    monkeypatch.setattr(chunks, "PORTION_FILES", 4)
    rng = np.random.default_rng(3)
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(NUM_FILES // 2):
            pixels = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{number:02}.png")
    return Data(source="folder", root=str(tmp_path / "images"), image_size=16)


def unfinished(home):
    return list((home / "prepared").glob(".unfinished-*"))


def wait_until_idle(client):
    """Until no worker has a task."""
    until(lambda: not any(client.processing().values()), "idle workers", seconds=20)


def test_a_preparation_over_its_limit_ends_and_the_next_one_does_only_the_rest(workers, images, tmp_path):
    address, client = workers
    home = tmp_path / "home"
    client.run(set_reader, delay=0.2)
    with (
        refused("limits.prepare_seconds", "limits.prepare_seconds=3", kind=TimeLimitError),
        deadline.time_limit("limits.prepare_seconds", 3),
    ):
        graph.prepare(source.list_samples(images), images, home, address)
    wait_until_idle(client)
    assert list((home / "prepared").glob(".tmp-*")) == []
    (left,) = unfinished(home)
    num_finished = sum(json.loads(line)["num_samples"] for line in store.read_finished_lines(left))
    assert 0 < num_finished < NUM_FILES

    client.run(set_reader)
    progress = []
    prepared = graph.prepare(
        source.list_samples(images), images, home, address, on_progress=lambda done, _: progress.append(done)
    )
    assert progress[0] > num_finished, "it begins with what is there"
    assert progress[-1] == NUM_FILES
    whole = graph.prepare(source.list_samples(images), images, tmp_path / "another", address)
    assert prepared.fingerprint == whole.fingerprint
    assert store.verify(Path(prepared.path)) == ()
    assert unfinished(home) == []


def test_a_source_that_fails_for_a_moment_is_tried_again_for_what_is_missing(workers, images, tmp_path, prefect_url):
    address, client = workers
    tries = tmp_path / "tries"
    client.run(set_reader, failing="dog/07.png", tries=str(tries), times=graph.RETRIES + 1)

    @flow
    def stage_alone():
        limits = Limits(retries=2, retry_delay_seconds=0.5)
        return with_retries(prepare, limits)(images, str(tmp_path / "home"), address)

    with settings.temporary_settings({settings.PREFECT_API_URL: prefect_url}):
        state = stage_alone(return_state=True)
    prepared = state.result()
    assert prepared.num_rejected == 0
    assert store.verify(Path(prepared.path)) == ()
    assert tries.stat().st_size == graph.RETRIES + 2, "one more than Dask's own tries"
    written = {path.stat().st_mtime for path in Path(prepared.path).glob("*/*.images.npy")}
    runs = httpx.post(f"{prefect_url}/task_runs/filter", json={"task_runs": {"name": {"like_": "prepare"}}}).json()
    (run,) = [run for run in runs if run["flow_run_id"] == str(state.state_details.flow_run_id)]
    assert run["run_count"] == 2
    states = httpx.get(f"{prefect_url}/task_run_states/", params={"task_run_id": run["id"]}).json()
    (failed,) = [state for state in states if state["name"] == "AwaitingRetry"]
    begun_again = next(state for state in states if state["name"] == "Retrying")
    again = begun_again["timestamp"]
    assert failed["timestamp"] < again
    old = [mtime for mtime in written if mtime < _unix(again)]
    assert old, "shards of the first try are not written again"


def _unix(timestamp):
    return datetime.fromisoformat(timestamp).timestamp()


def leased(run_id):
    """Devices that a run has; those of others are their business."""
    place = Environment().leases
    owners = {path.stem: DeviceLock(place, path.stem).owner() for path in place.glob("*.lease")}
    return [device for device, owner in owners.items() if owner and owner.run_id == run_id]


@pytest.mark.slow
def test_a_training_over_its_limit_ends_its_ranks_and_goes_on_from_its_checkpoint(make_job, cluster_address):
    job = make_job("execution.num_devices=2", "execution.checkpoint_steps=1", "recipe.num_epochs=2")
    with (
        planted(cluster_address, "rank-0=0.05"),
        refused("limits.train_seconds", "limits.train_seconds=25", kind=TimeLimitError),
        deadline.time_limit("limits.train_seconds", 25),
    ):
        train_group(job, cluster_address)
    assert running_ranks(job.run_id) == []
    assert leased(job.run_id) == []
    newest = newest_valid_checkpoint(job.checkpoints)
    result = train_group(job.model_copy(update={"resume": True}), cluster_address)
    assert result.first_step == (step_of(newest) if newest else 0)
    assert result.num_steps == 2 * 21


class Night:
    """One run of the program with an MLflow store of its own experiment."""

    def __init__(self, paceline, url):
        self._paceline = paceline
        self._url = url
        self.client = MlflowClient(Environment().tracking_uri)

    def run(self, *arguments):
        process = self._paceline("run", *arguments, "--json")
        stdout, stderr = process.communicate(timeout=280)
        return process.returncode, json.loads(stdout.splitlines()[-1]) if stdout else None, stderr

    def only_run(self):
        experiment = self.client.get_experiment_by_name("limited").experiment_id
        (run,) = self.client.search_runs([experiment])
        return run

    def flow_state(self, run):
        return httpx.get(f"{self._url}/flow_runs/{run.data.tags['prefect.flow_run_id']}").json()["state"]


@pytest.mark.slow
@pytest.mark.timeout(900)  # three runs of the program
def test_a_run_over_its_limits_tells_it_and_what_is_done_is_not_done_again(paceline, prefect_url):
    night = Night(paceline, prefect_url)
    settings = ["track.experiment=limited", "recipe.num_epochs=100", "limits.train_seconds=2"]
    status, _, stderr = night.run("digits", *SMALL, *settings)
    assert status == 1, stderr
    said = "limits.train_seconds=2: the stage has not ended within so many seconds"
    assert f"\nerror: {said}" in f"\n{stderr}"
    run = night.only_run()
    assert run.info.status == "FAILED"
    assert run.data.tags["paceline.error"].startswith(said)
    assert night.flow_state(run)["type"] == "FAILED"
    assert said in night.flow_state(run)["message"]
    assert leased(run.info.run_id) == []

    resume = ["--resume", run.info.run_id]
    status, first, stderr = night.run(*resume, "limits.train_seconds=600")
    assert status == 0, stderr
    directory = Environment().root / "runs" / run.info.run_id
    attempts = list(directory.glob("attempt-*"))

    night.client.set_terminated(run.info.run_id, "FAILED")  # as if its last stage had failed
    (Path(first["train"]["checkpoint"])).unlink()  # with the ranks' result it is not needed any more
    untold = max(attempts, key=lambda path: path.name) / "rank-0" / FILE
    # As if its flow had been killed before it told the last line.
    untold.write_text(untold.read_text() + '["train/loss", 0.5, 4000000000000, 1000000]\n')
    status, second, stderr = night.run(*resume)
    assert status == 0, stderr
    assert night.client.get_metric_history(run.info.run_id, "train/loss")[-1].step == 1_000_000
    assert "The training has finished before" in stderr
    assert "The evaluation is finished already" in stderr
    assert list(directory.glob("attempt-*")) == attempts
    for stage in ("train", "evaluate", "time_budget", "workload"):
        assert second[stage] == first[stage], stage
    assert second["dataset"]["reused"]
    assert night.client.get_run(run.info.run_id).info.status == "FINISHED"
