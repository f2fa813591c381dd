"""Metrics on their way to a real store: none is lost with its process, none comes twice."""

import pytest
from mlflow.tracking import MlflowClient

from conf.site import Site
from tasks.curves import FILE, MetricsFile
from tasks.track import metrics
from tasks.track.metrics import delivered
from tests.patience import until


@pytest.fixture
def run_id():
    client = MlflowClient(Site().tracking_uri)
    experiment = client.get_experiment_by_name("metrics")
    return client.create_run(
        experiment.experiment_id if experiment else client.create_experiment("metrics")
    ).info.run_id


@pytest.fixture
def attempt(tmp_path):
    """Writes what an attempt's first rank logs."""

    def written(number, *steps):
        directory = tmp_path / f"attempt-{number}" / "rank-0"
        directory.mkdir(parents=True)
        file = MetricsFile(directory / FILE)
        for sample, step in enumerate(steps):
            file.log({"train/loss": 1 / step}, step)
            file.log({"system/cpu": 50.0}, sample)
        file.close()

    return written


def steps(run_id, key="train/loss"):
    return [metric.step for metric in MlflowClient(Site().tracking_uri).get_metric_history(run_id, key)]


def test_attempts_are_told_as_one_training(run_id, attempt, tmp_path):
    told = []
    with delivered(tmp_path, Site().tracking_uri, run_id, told.append):
        attempt(0, 1, 2, 3)
        attempt(1, 3, 4)
    assert steps(run_id) == [1, 2, 3, 4], "what is done again is not told again"
    assert steps(run_id, "system/cpu") == [0, 1, 2, 3, 4]
    attempt(2, 4, 5)
    with delivered(tmp_path, Site().tracking_uri, run_id, told.append):
        pass
    assert steps(run_id) == [1, 2, 3, 4, 5]
    assert steps(run_id, "system/cpu") == [0, 1, 2, 3, 4, 5, 6]
    assert told == []


def test_they_come_while_the_training_goes_on(run_id, attempt, tmp_path):
    with delivered(tmp_path, Site().tracking_uri, run_id, print):
        attempt(0, 1, 2)
        until(lambda: steps(run_id) == [1, 2], "metrics")


def test_what_a_store_that_is_away_did_not_take_is_delivered_by_the_next(run_id, attempt, tmp_path, monkeypatch):
    away, told = f"sqlite:////proc/{run_id}/mlflow.db", []
    monkeypatch.setattr(metrics, "CLOSE_SECONDS", 3.0)
    with delivered(tmp_path, away, run_id, told.append):
        attempt(0, 1, 2)
    assert len(told) == 2, told
    assert told[0].startswith("MLflow is away, metrics are kept: ")
    assert f"paceline run --resume {run_id} delivers them" in told[1]
    with delivered(tmp_path, Site().tracking_uri, run_id, told.append):
        pass
    assert steps(run_id) == [1, 2]
    assert len(told) == 2


def test_a_store_that_comes_back_gets_all(run_id, attempt, tmp_path, monkeypatch):
    told, is_away = [], True
    taken = MlflowClient.log_batch

    def log_batch(self, *arguments, **keywords):
        nonlocal is_away
        if is_away:
            is_away = False
            raise ConnectionError("down")
        return taken(self, *arguments, **keywords)

    monkeypatch.setattr(MlflowClient, "log_batch", log_batch)
    monkeypatch.setattr(metrics, "RETRY_SECONDS", 0.1)
    with delivered(tmp_path, Site().tracking_uri, run_id, told.append):
        attempt(0, 1, 2)
    assert steps(run_id) == [1, 2]
    assert told == ["MLflow is away, metrics are kept: down"]


def test_an_error_does_not_wait_for_the_store(run_id, attempt, tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "BREAK_SECONDS", 0.1)

    def failing():
        with delivered(tmp_path, f"sqlite:////proc/{run_id}/mlflow.db", run_id, lambda told: None):
            attempt(0, 1)
            raise InterruptedError

    with pytest.raises(InterruptedError):
        failing()
