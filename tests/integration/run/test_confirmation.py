"""An alarm is confirmed by timing the last good run again, on a real cluster in fresh rank processes."""

import json
import time
from dataclasses import replace
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from prefect import flow
from prefect.settings import PREFECT_API_URL, temporary_settings

from paceline.flows.run import confirmation
from paceline.flows.run.outcome import Outcome
from paceline.tasks.cluster.hardware import describe
from paceline.tasks.errors import RankError
from paceline.tasks.records.measurement import Validity
from paceline.tasks.track import run as tracking
from paceline.tasks.track.environment import describe_environment
from paceline.tasks.track.run import RunHandle
from tests.support.jobs import changed, planted

THROUGHPUT = {"measure": "throughput", "name": "throughput", "value": 1.0, "expected": 2.0, "limit": 1.5}
SCORE = THROUGHPUT | {"measure": "score", "name": "accuracy"}
REGRESSION = {"verdict": "regression", "text": "throughput fell", "grew": None}


@pytest.fixture(scope="module", autouse=True)
def _server(prefect_url):
    with temporary_settings({PREFECT_API_URL: prefect_url}):
        yield


@flow(name="confirming")
def confirm(outcome, job, address, handle, summary):
    """The end of a run whose alarm is to be confirmed."""
    return confirmation.confirm_regression(outcome, job, address, handle, summary)


class Night:
    """A recorded run with an alarm, and the last good run of its series."""

    def __init__(self, make_job, *overrides, **old):
        made = make_job("track.on_regression=confirm", "speedup.max_seconds=1", "speedup.num_blocks=6", *overrides)
        self.job = changed(made, track={"experiment": "training"})
        self.job.directory.mkdir(parents=True, exist_ok=True)
        self.outcome = Outcome(
            config=self.job.config,
            plan=self.job.plan,
            prepared=self.job.prepared,
            trained=Trained(),
            evaluated=None,
            workload="workload",
            hardware=describe(),
        )
        uri = self.job.tracking_uri
        experiment = tracking.MlflowClient(uri).get_experiment_by_name("training").experiment_id
        self.handle = RunHandle(tracking_uri=uri, experiment="training", experiment_id=experiment, run_id=made.run_id)
        tracking.finish(self.handle, "FINISHED")
        self.good = tracking.begin(uri, experiment, self.job.config, {"paceline.series": self.outcome.series})
        plan = self.job.plan.model_copy(update=old)
        summary = {"execution": plan.model_dump(mode="json"), "speedup": {"candidate_samples_per_second": 1e6}}
        tracking.log_document(self.good, "summary.json", summary)
        tracking.log_document(self.good, "environment.json", describe_environment((), ()) | {"packages": []})
        tracking.finish(self.good, "FINISHED")

    def confirm(self, address, *changes):
        summary = {"run_id": self.job.run_id, "experiment": "training"}
        summary["regression"] = REGRESSION | {"changes": [dict(one, num_runs=1, num_before=8) for one in changes]}
        return confirm(self.outcome, self.job, address, self.handle, summary)["regression"]

    def tags(self):
        run = self.handle.client.get_run(self.job.run_id)
        assert run.info.status == "FINISHED"
        return run.data.tags


class Trained:
    """As much of a training's result as a confirmation reads."""

    worker_load = None
    hosts = ("a",)


@pytest.fixture(scope="module")
def night(make_job):
    """A night that was executed as the last good run, and one that was not."""
    return Night(make_job)


def test_a_score_is_not_timed(night, cluster_address):
    judged = night.confirm(cluster_address, SCORE)
    assert judged["confirmation"]["verdict"] == "not timed"
    assert judged["text"] == "throughput fell; not checked: a score does not depend on speed, so nothing was timed"
    assert night.tags()["paceline.confirmation"] in judged["text"]


def test_nothing_is_confirmed_without_an_alarm_or_the_setting(night, cluster_address):
    normal = {"regression": {"verdict": "normal"}}
    assert confirm(night.outcome, night.job, cluster_address, night.handle, normal) == normal
    marked = changed(night.job, track={"on_regression": "mark"}).config
    alarm = {"regression": REGRESSION | {"changes": [THROUGHPUT]}}
    assert confirm(replace(night.outcome, config=marked), night.job, "", night.handle, alarm) == alarm


def test_the_time_limit_bounds_it(make_job, cluster_address):
    judged = Night(make_job, "track.confirm_seconds=0.001").confirm(cluster_address, THROUGHPUT)
    assert judged["confirmation"]["verdict"] == "not timed"
    assert "track.confirm_seconds=0.001" in judged["text"]


def test_a_good_run_without_records_is_named(make_job, cluster_address):
    night = Night(make_job, "recipe.num_epochs=3")
    bare = tracking.begin(
        night.job.tracking_uri, night.good.experiment_id, night.job.config, {"paceline.series": night.outcome.series}
    )
    tracking.finish(bare, "FINISHED")
    judged = night.confirm(cluster_address, THROUGHPUT)
    assert judged["text"].endswith(f"not checked: the records of the last good run {bare.run_id[:8]} are gone")


def test_an_interruption_sends_the_alarm_and_leaves_the_run_as_it_was(night, cluster_address, prefect_url, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(confirmation, "_against", interrupt)
    with pytest.raises(KeyboardInterrupt):
        night.confirm(cluster_address, THROUGHPUT)
    night.tags()
    wanted = {"artifacts": {"key": {"any_": ["regression"]}}, "sort": "CREATED_DESC"}
    texts = [found["data"] for found in httpx.post(f"{prefect_url}/artifacts/filter", json=wanted).json()]
    assert any("throughput fell; not checked: it was interrupted" in text for text in texts)


@pytest.mark.slow
def test_the_same_execution_says_how_the_machine_has_changed(night, cluster_address):
    started = time.monotonic()
    judged = night.confirm(cluster_address, THROUGHPUT)
    found = judged["confirmation"]
    assert found["verdict"] == "same execution", judged
    assert found["ratio"] is None
    assert 0 < found["machine"]["low"] < found["machine"]["value"] < 0.5, "a million samples per second then"
    assert found["machine_share"] == 1
    assert "this is about the machine alone" in judged["text"]
    assert "; 6 fresh processes on " in judged["text"]
    assert time.monotonic() - started < night.job.config.track.confirm_seconds
    stored = night.handle.client.download_artifacts(night.job.run_id, "summary.json")
    with open(stored) as file:  # noqa: PTH123
        assert json.load(file)["regression"]["confirmation"]["verdict"] == "same execution"


@pytest.mark.slow
def test_a_slower_execution_is_confirmed_against_the_last_good_one(make_job, cluster_address):
    """The new run loads sample by sample in the foreground, the last good one from memory."""
    slower = Night(make_job, "execution.loading=foreground", loading="resident")
    with planted(cluster_address, "input=0.002"):
        judged = slower.confirm(cluster_address, THROUGHPUT)
    found = judged["confirmation"]
    assert found["verdict"] == "confirmed", judged
    assert found["num_pairs"] == 6
    assert found["ratio"]["high"] < 1
    assert "rebuilt: execution.loading resident" in judged["text"]


def bisect(make_job, address, monkeypatch, *overrides, before=lambda job: None):
    """An alarm with a search over probes of simulated times, in which the loading matters and the layout does not.

    Also returns the night, and the loading and layout of all probes.
    """
    noise, states = np.random.default_rng(0), set()

    def simulated(job, _):
        time.sleep(0.02)
        before(job)
        states.add((job.plan.loading, job.plan.memory_format))
        seconds = (2e-3 if job.plan.loading == "foreground" else 1e-3) * float(np.exp(noise.normal(0, 0.01)))
        probe = SimpleNamespace(seconds_per_sample=lambda _: seconds, validity=Validity(contaminated=False))
        return SimpleNamespace(host="a", probe=probe)

    settings = ("execution.loading=foreground", "execution.memory_format=contiguous", *overrides)
    night = Night(make_job, "track.on_regression=bisect", *settings, loading="resident", memory_format="channels_last")
    monkeypatch.setattr(confirmation, "_measure", simulated)
    return night.confirm(address, THROUGHPUT), night, states


def test_the_change_that_made_it_slower_is_searched(make_job, cluster_address, monkeypatch):
    judged, night, states = bisect(make_job, cluster_address, monkeypatch)
    assert judged["confirmation"]["verdict"] == "confirmed"
    assert judged["confirmation"]["causes"] == ["execution.loading resident -> foreground"]
    assert judged["text"].endswith("; the cause: execution.loading resident -> foreground makes it slower")
    assert ("resident", "contiguous") in states, "one change alone"
    with open(night.handle.client.download_artifacts(night.job.run_id, "bisection.json")) as file:  # noqa: PTH123
        assert json.load(file)["outcome"] == "FOUND"


@pytest.mark.slow
def test_a_search_without_enough_time_leaves_the_alarm_confirmed(make_job, cluster_address, monkeypatch):
    judged, _, _ = bisect(make_job, cluster_address, monkeypatch, "track.bisect_seconds=2")
    assert judged["confirmation"]["verdict"] == "confirmed"
    assert judged["confirmation"]["causes"] == []
    assert "; the cause was not found: track.bisect_seconds=2 is too short for 2 changes: they take" in judged["text"]


@pytest.mark.slow
def test_an_interrupted_search_leaves_the_alarm_sent_and_confirmed(make_job, cluster_address, prefect_url, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(confirmation, "_search", interrupt)
    with pytest.raises(KeyboardInterrupt):
        bisect(make_job, cluster_address, monkeypatch, "recipe.num_epochs=4")
    wanted = {"artifacts": {"key": {"any_": ["regression"]}}, "sort": "CREATED_DESC"}
    texts = [found["data"] for found in httpx.post(f"{prefect_url}/artifacts/filter", json=wanted).json()]
    assert any(
        "throughput fell; confirmed: " in text and "the search for the cause has started" in text for text in texts
    )


@pytest.mark.slow
def test_a_change_that_cannot_be_executed_alone_is_skipped(make_job, cluster_address, monkeypatch):
    refused = []

    def refuses(job):
        if (job.plan.loading, job.plan.memory_format) == ("resident", "contiguous"):
            refused.append(job)
            raise RankError("rank 0 failed: versions that do not fit together")

    judged, _, _ = bisect(make_job, cluster_address, monkeypatch, "recipe.num_epochs=5", before=refuses)
    assert refused
    assert "; the cause was not found: the command fails at all changes" in judged["text"]


@pytest.mark.benchmark
@pytest.mark.timeout(7200)
def test_a_search_in_real_processes_names_the_slow_loading(make_job, cluster_address):
    """About half an hour: the loading was made slow, and the layout changed too."""
    settings = ("execution.loading=foreground", "execution.memory_format=contiguous", "recipe.num_epochs=6")
    night = Night(make_job, "track.on_regression=bisect", *settings, loading="resident", memory_format="channels_last")
    started = time.monotonic()
    with planted(cluster_address, "input=0.002"):
        judged = night.confirm(cluster_address, THROUGHPUT)
    print(f"{time.monotonic() - started:.0f} s: {judged['text']}")  # noqa: T201
    assert judged["confirmation"]["causes"] == ["execution.loading resident -> foreground"]
