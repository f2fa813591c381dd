"""Studies, advice and comparisons as a user runs them: real Prefect server, MLflow server, Dask cluster and ranks."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

TINY = [
    "data.image_size=12",
    "model.width=4",
    "model.depth=1",
    "recipe.num_epochs=4",
    "recipe.warmup_epochs=0.5",
    "recipe.batch_scaling=strong",
    "speedup.max_seconds=3",
]
AXIS = ["--axis", "execution.precision=32-true,bf16-mixed"]


@pytest.fixture(scope="module")
def mlflow_url(tmp_path_factory):
    """A real MLflow server on a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    home = tmp_path_factory.mktemp("mlflow")
    log = (home / "server.log").open("wb")
    server = subprocess.Popen(
        [
            *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"),
            *("--backend-store-uri", f"sqlite:///{home}/mlflow.db", "--artifacts-destination", str(home / "artifacts")),
        ],
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while True:
            assert server.poll() is None, "the MLflow server ended"
            assert time.monotonic() < deadline, "no MLflow server within 120 s"
            try:
                urllib.request.urlopen(f"{url}/health", timeout=2).close()
                break
            except OSError:
                time.sleep(0.3)
        yield url
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)
        log.close()


@pytest.fixture
def run(paceline, mlflow_url):
    """Runs a command to its end; returns its JSON and what it told."""

    def to_the_end(*arguments, status=0):
        process = paceline(*arguments, "--json", MLFLOW_TRACKING_URI=mlflow_url)
        stdout, stderr = process.communicate(timeout=280)
        assert process.returncode == status, stderr
        return (json.loads(stdout.splitlines()[-1]) if stdout else None), stderr

    return to_the_end


def children(client, run_id):
    experiment = client.get_run(run_id).info.experiment_id
    return client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{run_id}'")


def artifact(client, run_id, name, folder):
    return Path(client.download_artifacts(run_id, name, str(folder))).read_text()


def test_a_study_reports_a_crashed_arm_and_goes_on(run, mlflow_url, tmp_path):
    summary, told = run(
        *("study", "digits", *TINY, *AXIS, "--axis", "recipe.learning_rate=0.1,1e30", "--repeats", "1"),
        "track.experiment=crashes",
    )
    arms = {arm["name"]: arm for arm in summary["arms"]}
    assert len(arms) == 4
    crashed = [arm for name, arm in arms.items() if "1e30" in json.dumps(arm) or "1e+30" in json.dumps(arm)]
    assert len(crashed) == 2
    assert all(arm["num_failed"] == 1 and "is nan" in arm["error"] for arm in crashed)
    assert all(arm["ratio"] is None and arm["accuracy"] is None for arm in crashed)
    whole = [arm for arm in arms.values() if arm not in crashed]
    assert all(arm["num_failed"] == 0 and arm["samples_per_second"] > 0 for arm in whole)
    faster = next(arm for arm in whole if arm["execution"]["execution.precision"] == "bf16-mixed")
    assert faster["matches"] is True
    assert (faster["ratio"] or 1) > 0, "None where other work disturbed the baseline"
    assert faster["low"] is None, "one repeat has no interval"
    assert "Failed, and left out" in told

    client = MlflowClient(mlflow_url)
    parent = client.get_run(summary["run_id"])
    assert parent.info.status == "FINISHED"
    assert parent.data.metrics["study/num_failed"] == 2
    runs = children(client, summary["run_id"])
    assert sorted(run.info.status for run in runs) == ["FAILED", "FAILED", "FINISHED", "FINISHED"]
    found = next(run for run in runs if run.info.run_id == faster["run_id"])
    assert found.data.metrics.get("speedup/ratio") == pytest.approx(faster["ratio"])
    assert found.data.tags["paceline.match"] == "True"
    page = artifact(client, summary["run_id"], "report.html", tmp_path)
    for question in ("How much faster", "Compared with what?", "Where did the time go?", "What limits it?"):
        assert question in page
    study = json.loads(artifact(client, summary["run_id"], "study.json", tmp_path))
    difference = study["differences"][0]
    parts = sum(item["seconds"] - item["baseline_seconds"] for item in difference["items"])
    assert parts == pytest.approx(difference["difference"])


def test_an_interrupted_study_goes_on_where_it_was(paceline, run, mlflow_url):
    arguments = ["study", "digits", *TINY, *AXIS, "--repeats", "1", "track.experiment=interrupted"]
    process = paceline(*arguments, MLFLOW_TRACKING_URI=mlflow_url)
    client = MlflowClient(mlflow_url)
    parent = wait_for_first_arm(client, process)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, told
    assert client.get_run(parent).info.status == "KILLED"
    before = {run.info.run_id for run in children(client, parent) if run.info.status == "FINISHED"}
    assert len(before) == 1

    summary, _ = run("study", "--resume", parent)
    assert summary["run_id"] == parent
    assert client.get_run(parent).info.status == "FINISHED"
    after = {run.info.run_id for run in children(client, parent) if run.info.status == "FINISHED"}
    assert before < after
    assert len(after) == 2, "what was trained is not trained again"
    assert {arm["run_id"] for arm in summary["arms"]} == after


def wait_for_first_arm(client, process):
    """Until the newest study has one finished training; its id."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, process.stderr.read()
        experiment = client.get_experiment_by_name("interrupted")
        runs = client.search_runs([experiment.experiment_id]) if experiment else []
        if any(run.data.tags.get("paceline.role") == "arm" and run.info.status == "FINISHED" for run in runs):
            return next(run.info.run_id for run in runs if run.data.tags["paceline.role"] == "study")
        time.sleep(0.1)
    raise TimeoutError("no training within 120 s")


def test_a_prediction_is_stored_checked_and_compared(run, mlflow_url, tmp_path):  # noqa: PLR0915  one story, 2 minutes
    common = [*TINY, "track.experiment=advice"]
    advice, _ = run("advise", "digits", *common, "--devices", "2,4", "--deadline", "3600")
    assert [(p["num_devices"], p["scaling"]) for p in advice["predictions"]] == [
        (2, "strong"),
        (4, "strong"),
        (2, "weak"),
        (4, "weak"),
    ]
    assert all(p["low"] < p["ratio"] < p["high"] for p in advice["predictions"])
    assert advice["link"]["source"] == "measured"
    assert advice["cheapest"]["num_devices"] == 1
    settings = [move["setting"] for move in advice["advice"]]
    assert "recipe.batch_size=256" in settings
    assert any(setting.startswith("execution.precision") for setting in settings)
    assert "faster input" in settings

    measured, told = run("run", "digits", *common, "execution.num_devices=2")
    assert measured["prediction"]["prediction_run_id"] == advice["run_id"]
    assert measured["prediction"]["measured"] == pytest.approx(2 * measured["speedup"]["efficiency"])
    assert "was predicted" in told
    client = MlflowClient(mlflow_url)
    metrics = client.get_run(measured["run_id"]).data.metrics
    assert metrics["prediction/error"] == pytest.approx(
        advice["predictions"][0]["ratio"] / measured["prediction"]["measured"] - 1
    )
    assert "Predicted before" in artifact(client, measured["run_id"], "report.html", tmp_path)

    single, _ = run("run", "digits", *common)
    page = tmp_path / "compared.html"
    comparison, told = run("compare", single["run_id"], measured["run_id"], "--html", str(page))
    base, row = comparison["runs"]
    assert base["is_base"]
    assert row["match"]["matches"]
    assert row["match"]["scaling"] == "strong"
    if not any(one["why_no_ratio"].endswith("other work") for one in comparison["runs"]):
        assert row["ratio"] > 0
    assert comparison["view"].startswith(mlflow_url)
    assert "execution.num_devices" in page.read_text()
    newest, _ = run("compare", "--experiment", "advice", "--last", "2")
    assert [row["run_id"] for row in newest["runs"]] == [measured["run_id"], single["run_id"]]

    foreign, told = run("compare", single["run_id"], advice["run_id"])
    assert foreign["runs"][1]["ratio"] is None
    assert "not comparable: nothing is known of one of them" in told


@pytest.mark.slow
def test_a_named_link_needs_one_device_alone_and_claims_less(run):
    common = [*TINY, "track.experiment=given"]
    advice, _ = run("advise", "digits", *common, "--devices", "2", "--link", "ethernet25")
    assert advice["link"]["name"] == "ethernet25"
    assert advice["profile"]["waiting"] is None
    found = advice["predictions"][0]
    assert found["high"] / found["low"] > 1.15


def test_the_views_columns_exist_in_the_store(run, mlflow_url):
    from flows.compare import COLUMNS

    client = MlflowClient(mlflow_url)
    experiment = client.get_experiment_by_name("advice")
    runs = client.search_runs([experiment.experiment_id], "tags.`paceline.role` = 'run'")
    known = {"metrics": set(), "params": set(), "tags": set()}
    for found in runs:
        for kind, names in known.items():
            names.update(getattr(found.data, kind))
    for column in COLUMNS:
        kind, _, name = column.partition(".")
        assert name.strip("`") in known[kind], column
    assert any(tag.startswith("mlflow.sharedViewState.") for tag in experiment.tags)
