"""An MLflow server that goes away in the middle of a training: what it misses reaches it later."""

import json
import time
from pathlib import Path

import pytest
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from tests.integration.conftest import SMALL
from tests.integration.faults.test_recovery import told_steps
from tests.support.patience import until
from tests.support.tcp_relay import tcp_relay


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("away_seconds", [5.0, 600.0])
def test_a_training_survives_a_server_that_is_away(paceline, mlflow_server, tmp_path, away_seconds):
    """For ten minutes: the training has ended long before. By its own settings MLflow's client gives up after four."""
    home, model = tmp_path / "home", f"digits-away-{away_seconds:g}"
    settings = [*SMALL, "recipe.num_epochs=20", "execution.checkpoint_steps=10", "track.experiment=away"]
    settings.append(f"track.register={model}")
    process = paceline(
        "run", "digits", *settings, "--json", MLFLOW_TRACKING_URI=mlflow_server.url, PACELINE_HOME=str(home)
    )
    wait_for_a_checkpoint(home, process)
    mlflow_server.stop()
    try:
        time.sleep(away_seconds)
        assert process.poll() is None, "a run does not end with its results untold"
    finally:
        mlflow_server.start()
    stdout, stderr = process.communicate(timeout=600)
    assert process.returncode == 0, stderr
    summary = json.loads(stdout.splitlines()[-1])
    client = MlflowClient(mlflow_server.url)
    run = client.get_run(summary["run_id"])
    assert run.info.status == "FINISHED"
    assert run.data.metrics["test/accuracy"] == summary["evaluate"]["accuracy"]
    told = {"validation/accuracy": list(range(21, 20 * 21 + 1, 21)), "train/loss": told_steps(20)}
    for key, steps in told.items():
        assert [metric.step for metric in client.get_metric_history(summary["run_id"], key)] == steps
    assert any(artifact.path == "report.html" for artifact in client.list_artifacts(summary["run_id"]))
    assert client.get_model_version_by_alias(model, "champion").run_id == summary["run_id"]


@pytest.mark.slow
def test_a_run_that_is_killed_before_it_is_finished_has_no_champion(paceline, mlflow_server, tmp_path):
    client = MlflowClient(mlflow_server.url)
    settings = [*SMALL, "track.experiment=unfinished", "track.register=digits-unfinished"]
    with tcp_relay(mlflow_server.url, b'"status": "FINISHED"') as (address, is_finishing):
        process = paceline(
            "run", "digits", *settings, MLFLOW_TRACKING_URI=address, PACELINE_HOME=str(tmp_path / "home"), output=None
        )
        try:
            until(is_finishing.is_set, "end of the run", process=process)
        finally:
            process.kill()
            process.wait()
        experiment = client.get_experiment_by_name("unfinished").experiment_id
        until(lambda: [run.info.status for run in client.search_runs([experiment])] == ["KILLED"], "status", seconds=60)
    assert client.search_model_versions("name='digits-unfinished'"), "it was good enough"
    with pytest.raises(MlflowException, match="alias"):
        client.get_model_version_by_alias("digits-unfinished", "champion")


def wait_for_a_checkpoint(home: Path, process):
    while not list(home.glob("runs/*/checkpoints/step-*.ckpt")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
