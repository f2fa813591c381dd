"""Night after night: a run is judged by those before it, tells where it is worse, and else hands its model on."""

import json
import os
from pathlib import Path

import httpx
import pytest
from mlflow.tracking import MlflowClient

from paceline.conf.environment import Environment
from paceline.flows.run.history import past_runs
from paceline.tasks.track.run import RunHandle
from tests.support.jobs import PLANTED
from tests.support.nights import NIGHT, QUIET_RATE, repeat, set_alarm, web_hook
from tests.support.patience import until

WORSE = {"PYTHONPATH": PLANTED, "PLANT": "input=0.002", "BLIND": "yes"}
"""Slow, and without anything learned: what is slow alone may be laid to others, who are there in any suite of tests."""
NUM_NIGHTS = 8

pytestmark = pytest.mark.slow
"""test_services_nights.py has nights by schedule, on real services."""


@pytest.fixture(scope="module")
def night(paceline):
    """Runs one night to its end: status, summary and stderr."""

    def run(*overrides, **environment):
        path = os.pathsep.join(filter(None, [environment.pop("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")]))
        process = paceline("run", *NIGHT, *overrides, "--json", **environment, **({"PYTHONPATH": path} if path else {}))
        stdout, stderr = process.communicate(timeout=240)
        return process.returncode, json.loads(stdout.splitlines()[-1]), stderr

    return run


@pytest.fixture(scope="module")
def client():
    return MlflowClient(Environment().tracking_uri, Environment().tracking_uri)


@pytest.fixture(scope="module")
def hook():
    """The address of a web hook, and what has been sent to it."""
    with web_hook() as received:
        yield received


@pytest.fixture(scope="module")
def first_nights(night, client):
    """One real night, and seven after it with its figures, as a quiet machine would have made them."""
    status, summary, stderr = night()
    assert status == 0, stderr
    repeat(client, summary["run_id"], NUM_NIGHTS - 1)
    return summary


def tags_of(client, summary):
    return client.get_run(summary["run_id"]).data.tags


def flow_run(url, summary, client):
    identifier = tags_of(client, summary)["prefect.flow_run_id"]
    return httpx.get(f"{url}/flow_runs/{identifier}").json()


def test_the_first_night_is_not_judged_and_its_model_becomes_the_champion(first_nights, client):
    assert first_nights["regression"]["verdict"] == "too few runs"
    assert tags_of(client, first_nights)["paceline.regression"] == "none"
    version = client.get_model_version_by_alias("digits-nights", "champion")
    assert version.run_id == first_nights["run_id"]
    assert first_nights["registered"]["version"] == str(version.version)
    assert version.tags["paceline.dataset"] == first_nights["dataset"]["fingerprint"]
    assert float(version.tags["paceline.accuracy"]) == first_nights["evaluate"]["accuracy"]
    signature = Path(client.download_artifacts(first_nights["run_id"], "model/MLmodel")).read_text()
    assert "probabilities" in signature
    assert "[-1, 16, 16, 1]" in signature


def test_the_table_of_the_hardware_is_made_of_undisturbed_nights(first_nights, paceline, tmp_path):
    page = tmp_path / "hardware.html"
    device = first_nights["execution"]["device_name"][:5].upper()
    arguments = ["hardware", "--experiment", "nights", "--html", str(page), "--json", "--price"]
    process = paceline(*arguments, f"{device}=0.5")
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    found = json.loads(stdout.splitlines()[-1])
    row = found["tables"][0]["rows"][0]
    assert row["num_runs"] >= NUM_NIGHTS - 1
    assert row["samples_per_second"] == pytest.approx(QUIET_RATE, rel=0.05)
    assert row["fixed_seconds"] > 0
    assert row["price_per_million_samples"] == pytest.approx(0.5 / 3600 / row["samples_per_second"] * 1e6)
    assert "<svg" not in page.read_text(), "of one kind of hardware there is nothing to draw"
    assert row["execution"] in stderr


def test_a_slow_night_is_told_of_and_its_model_is_not_handed_on(first_nights, night, client, prefect_url, hook):
    address, received = hook
    assert "secret-path" not in set_alarm(address, PREFECT_API_URL=prefect_url)

    status, summary, stderr = night(**WORSE)
    assert status == 0, stderr
    judged = summary["regression"]
    assert judged["verdict"] == "regression", judged
    assert judged["grew"] == "data_wait"
    assert judged["text"].startswith("accuracy ")
    assert "throughput is not judged: the run has timed no undisturbed baseline" in judged["text"]
    assert "; data wait " in judged["text"]
    assert "no setting, code, version or data changed since the last good run" in judged["text"]
    assert "accuracy" in tags_of(client, summary)["paceline.regression"]
    assert summary["registered"]["version"] is None
    assert "regression" in summary["registered"]["gate"]
    champion = client.get_model_version_by_alias("digits-nights", "champion")
    assert champion.run_id == first_nights["run_id"]
    check_told(prefect_url, flow_run(prefect_url, summary, client), received)


def check_told(url, flow, received):
    assert flow["state"]["type"] == "COMPLETED"
    wanted = {"artifacts": {"flow_run_id": {"any_": [flow["id"]]}, "key": {"any_": ["regression"]}}}
    (artifact,) = httpx.post(f"{url}/artifacts/filter", json=wanted).json()
    assert "data wait" in artifact["data"]
    until(lambda: received, "message of the alarm", seconds=60)
    assert len(received) == 1
    assert received[0]["text"].startswith("nights is worse than before: accuracy")


def test_a_run_that_was_told_to_fails_with_everything_recorded(first_nights, night, client, prefect_url):
    status, summary, stderr = night("track.on_regression=fail", **WORSE)
    assert status == 1
    assert "\nerror: worse than before: accuracy" in stderr
    assert summary["regression"]["verdict"] == "regression", "a regression of the night before is no measure"
    assert client.get_run(summary["run_id"]).info.status == "FINISHED"
    flow = flow_run(prefect_url, summary, client)
    assert flow["state"]["type"] == "FAILED"
    assert "worse than before" in flow["state"]["message"]

    series = client.get_run(summary["run_id"]).data.tags["paceline.series"]
    handle = RunHandle(tracking_uri=Environment().tracking_uri, experiment="nights", experiment_id="", run_id="another")
    assert [run.regressed for run in past_runs(handle, series)][-2:] == [True, True]
    client.set_tag(summary["run_id"], "paceline.regression", "accepted")
    (first,) = past_runs(handle, series)
    assert (first.run_id, first.regressed) == (summary["run_id"], False), "the accepted run begins a new history"
