"""The study "no GPU?" as a user runs it: real Prefect server, MLflow server, Dask cluster, ranks and weights."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest
from mlflow.tracking import MlflowClient

from paceline.conf.environment import Environment
from paceline.tasks.evaluate.metrics import read_test_split
from paceline.tasks.train.launch.coordinator import train_group
from tests.integration.conftest import SMALL
from tests.support.outputs import told_by
from tests.support.patience import until

FIRST, OTHERS = ("data.classes=['0','1','2','3','4']", "data.classes=['5','6','7','8','9']")
ASKED = ["no-gpu", "digits", *SMALL, OTHERS]
CHANCE = 0.2
pytestmark = pytest.mark.slow  # the plan itself has unit tests


@pytest.fixture(scope="module")
def weights(make_job, cluster_address):
    """Of the first five digits."""
    return train_group(make_job(FIRST, "recipe.num_epochs=4"), cluster_address).weights


@pytest.fixture(scope="module")
def study(paceline, mlflow_server, weights):
    """One repeat to a target within everybody's reach: the summary, and what it told."""
    tail = ["--pretrained", weights, "--repeats", "1", "--target", "0.05", "--json", "track.experiment=no-gpu"]
    process = paceline(*ASKED, *tail, MLFLOW_TRACKING_URI=mlflow_server.url)
    out, told = process.communicate(timeout=280)
    assert process.returncode == 0, told
    return told_by("no-gpu", out), told


def nested_of(client, run_id):
    experiment = client.get_run(run_id).info.experiment_id
    found = client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{run_id}'")
    return [run for run in found if "paceline.superseded_by" not in run.data.tags]


def test_three_ways_are_measured_and_the_rest_is_labelled(study, mlflow_server, tmp_path):
    summary, told = study
    client = MlflowClient(mlflow_server.url)
    parent = client.get_run(summary["run_id"])
    assert (parent.info.status, parent.data.tags["paceline.role"]) == ("FINISHED", "no-gpu")
    here, there = ([way for way in summary["ways"] if way["is_measured"] == which] for which in (True, False))
    assert [way["name"] for way in here] == [way["name"] for way in there] == ["from scratch", "fine-tuned", "features"]
    runs = {run.info.run_id: run for run in nested_of(client, summary["run_id"])}
    assert {run_id for way in here for run_id in way["run_ids"]} == set(runs)
    for way in here:
        run = runs[way["run_ids"][0]]
        assert run.info.status == "FINISHED"
        assert run.data.tags["paceline.arm"] == way["name"]
        assert way["score"] == pytest.approx(run.data.metrics["test/accuracy"])
        assert (way["target_seconds"]["kind"], way["num_reached"]) == ("measured", 1)
        assert 0 < way["target_seconds"]["value"] < way["whole_seconds"]["value"]
        assert way["eager"]["value"] > 0
        assert way["executed"]["kind"] == "measured"
        assert way["joules"]["kind"] in {"measured", "not measured"}
        assert (way["target_ratio"] or {"low": None})["low"] is None, "one repeat has no interval"
    for way in there:
        assert way["executed"]["kind"] == "at most"
        assert "data sheet" in way["basis"]
        assert way["run_ids"] == []
    assert summary["verdict"] in told
    assert summary["verdict"] == parent.data.tags["paceline.verdict"]
    page = Path(client.download_artifacts(summary["run_id"], "report.html", str(tmp_path))).read_text()
    assert "at most" in page
    assert "What do the estimates rest on?" in page
    assert parent.data.metrics["features/accuracy"] == pytest.approx(here[2]["score"])


def test_the_classifier_saw_the_training_split_alone_and_told_what_is_recorded(study):
    summary, _ = study
    way = next(way for way in summary["ways"] if way["name"] == "features")
    directory = Environment().root / "runs" / way["run_ids"][0]
    found, spec = (json.loads((directory / name).read_text()) for name in ("result.json", "spec.json"))
    prepared = spec["prepared"]
    assert found["num_train"] == prepared["num_train"]
    truth = read_test_split(Path(prepared["path"]), prepared["class_names"])
    told = np.load(found["predictions"])["kept"].argmax(1)
    assert way["score"] == pytest.approx((told == truth.labels_N).mean())
    assert way["score"] > 2 * CHANCE, "of five digits that its backbone has never seen"


def test_a_way_that_fails_and_a_study_that_is_interrupted_are_told_truly(paceline, mlflow_server, weights):
    client = MlflowClient(mlflow_server.url)
    tail = ["--pretrained", weights, "--repeats", "1", "--fine-tune", "recipe.learning_rate=1e30", "--json"]
    process = paceline(*ASKED, *tail, "track.experiment=cut", MLFLOW_TRACKING_URI=mlflow_server.url)

    def noted():
        found = client.get_experiment_by_name("cut")
        for run in client.search_runs([found.experiment_id], "tags.`paceline.role` = 'no-gpu'") if found else []:
            notes = Environment().root / "runs" / run.info.run_id / "arms.jsonl"
            if notes.exists() and notes.read_text().endswith("\n"):
                return run.info.run_id
        return None

    run_id = until(noted, "first way", process=process)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, told
    assert client.get_run(run_id).info.status == "KILLED"
    assert f"paceline no-gpu --resume {run_id}" in client.get_run(run_id).data.tags["paceline.error"]
    assert all(run.info.status != "RUNNING" for run in nested_of(client, run_id))

    process = paceline("no-gpu", "--resume", run_id, "--json", MLFLOW_TRACKING_URI=mlflow_server.url)
    out, told = process.communicate(timeout=280)
    assert process.returncode == 0, told
    summary = json.loads(out.splitlines()[-1])
    assert (summary["run_id"], client.get_run(run_id).info.status) == (run_id, "FINISHED")
    tuned = next(way for way in summary["ways"] if way["name"] == "fine-tuned")
    assert (tuned["num_done"], tuned["num_failed"]) == (0, 1)
    assert "is nan" in tuned["error"]
    assert tuned["error"] in told
    failed = [run for run in nested_of(client, run_id) if run.data.tags["paceline.role"] == "arm"]
    assert "FAILED" in {run.info.status for run in failed}
