"""A metric from MLflow, logged by a real process into a real store."""

import sys

import pytest
from mlflow.tracking import MlflowClient

from paceline.tasks.judge.logged_metric import read_logged
from paceline.tasks.judge.processes import run_process
from paceline.tasks.judge.records import MlflowMetric, Question, Side
from tests.support.refusals import refused


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return f"sqlite:///{tmp_path_factory.mktemp('store') / 'mlflow.db'}"


def test_the_value_is_that_of_the_runs_of_the_process(store, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_RUN_ID", "that of another run")
    client = MlflowClient(store)
    other = client.create_run(client.create_experiment("others")).info.run_id
    client.log_metric(other, "loss", 7.0)
    (tmp_path / "train.py").write_text("import mlflow\nfor loss in (0.5, 0.25): mlflow.log_metric('loss', loss)\n")
    side = Side(name="new", command=f"{sys.executable} train.py", directory=str(tmp_path))
    logged = MlflowMetric(name="loss", tracking_uri=store)
    run = run_process(side, Question(old=side, new=side, logged=logged, budget_seconds=60, limit_seconds=60))
    assert (run.metric, client.get_run(run.run_id).data.metrics) == (0.25, {"loss": 0.25})
    assert run.run_id != other
    assert client.get_experiment(client.get_run(run.run_id).info.experiment_id).name == "judgements"

    token = client.get_run(run.run_id).data.tags["paceline.process"]
    with refused("--mlflow-metric", "los") as caught:
        read_logged(logged.model_copy(update={"name": "los"}), token, side)
    assert caught.value.hint == "--mlflow-metric loss"
    with refused("--mlflow-metric", "loss") as caught:
        read_logged(logged, "of no process", side)
    assert "MLFLOW_TRACKING_URI" in str(caught.value)
