"""An MLflow server that goes away in the middle of a training: what it misses reaches it later."""

import json
import time
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from tests.integration.conftest import SMALL
from tests.integration.faults.test_recovery import told_steps

AWAY_SECONDS = 5.0  # MLflow's own client tries for minutes


@pytest.mark.slow
def test_metrics_wait_for_a_server_that_is_away(paceline, mlflow_server, tmp_path):
    home = tmp_path / "home"
    settings = [*SMALL, "recipe.num_epochs=20", "execution.checkpoint_steps=10", "track.experiment=away"]
    process = paceline(
        "run", "digits", *settings, "--json", MLFLOW_TRACKING_URI=mlflow_server.url, PACELINE_HOME=str(home)
    )
    wait_for_a_checkpoint(home, process)
    mlflow_server.stop()
    try:
        time.sleep(AWAY_SECONDS)
        assert process.poll() is None, "a run does not end with its results untold"
    finally:
        mlflow_server.start()
    stdout, stderr = process.communicate(timeout=240)
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


def wait_for_a_checkpoint(home: Path, process):
    while not list(home.glob("runs/*/checkpoints/step-*.ckpt")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
