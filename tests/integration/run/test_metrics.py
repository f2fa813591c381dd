"""Metrics on their way to a real store: none is lost with its process, none comes twice."""

import pytest
from mlflow.tracking import MlflowClient

from paceline.conf.environment import Environment
from paceline.tasks.metrics_file import FILE, MetricsFile
from paceline.tasks.track import metrics_upload as metrics
from paceline.tasks.track.metrics_upload import upload_left, upload_metrics, upload_rest
from tests.support.patience import until


@pytest.fixture
def run_id():
    client = MlflowClient(Environment().tracking_uri)
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
    return [metric.step for metric in MlflowClient(Environment().tracking_uri).get_metric_history(run_id, key)]


def test_attempts_are_logged_as_one_training(run_id, attempt, tmp_path, caplog):
    with upload_metrics(tmp_path, Environment().tracking_uri, run_id):
        attempt(0, 1, 2, 3)
        attempt(1, 3, 4)
    assert steps(run_id) == [1, 2, 3, 4], "what is done again is not told again"
    assert steps(run_id, "system/cpu") == [0, 1, 2, 3, 4]
    attempt(2, 4, 5)
    with upload_metrics(tmp_path, Environment().tracking_uri, run_id):
        pass
    assert steps(run_id) == [1, 2, 3, 4, 5]
    assert steps(run_id, "system/cpu") == [0, 1, 2, 3, 4, 5, 6]
    assert caplog.messages == []


def test_they_come_while_the_training_goes_on(run_id, attempt, tmp_path):
    with upload_metrics(tmp_path, Environment().tracking_uri, run_id):
        attempt(0, 1, 2)
        until(lambda: steps(run_id) == [1, 2], "metrics")


@pytest.fixture
def away(run_id, monkeypatch):
    """A store that takes nothing, and little patience."""
    monkeypatch.setattr(metrics, "CLOSE_SECONDS", 0.5)
    return f"sqlite:////proc/{run_id}/mlflow.db"


def test_what_a_store_that_was_away_did_not_take_is_delivered_before_the_run_is_finished(
    run_id, attempt, tmp_path, away, caplog
):
    with upload_metrics(tmp_path, away, run_id):
        attempt(0, 1, 2)
        until(lambda: caplog.messages, "warning")
    assert [record.name for record in caplog.records] == [metrics.__name__]
    upload_left(Environment().tracking_uri, run_id)
    assert steps(run_id) == [1, 2]
    attempt(1, 3)
    upload_left(Environment().tracking_uri, run_id)
    assert steps(run_id) == [1, 2], "nothing was left"
    assert len(caplog.messages) == 1


def test_where_the_rest_lies_is_logged_when_it_is_given_up(run_id, attempt, tmp_path, away, caplog, monkeypatch):
    attempt(0, 1)
    with pytest.raises(InterruptedError), upload_metrics(tmp_path, away, run_id):
        raise InterruptedError
    monkeypatch.setattr(metrics, "LAST_SECONDS", 0.5)
    upload_left(away, run_id)
    monkeypatch.setattr(metrics, "CLOSE_SECONDS", 60.0)
    assert f"{tmp_path}/attempt-*/rank-0/metrics.jsonl" in caplog.text
    upload_rest(tmp_path, Environment().tracking_uri, run_id)
    assert steps(run_id) == [1], "by another flow"


def test_a_store_that_comes_back_gets_all(run_id, attempt, tmp_path, monkeypatch, caplog):
    is_away = True
    taken = MlflowClient.log_batch

    def log_batch(self, *arguments, **keywords):
        nonlocal is_away
        if is_away:
            is_away = False
            raise ConnectionError("down")
        return taken(self, *arguments, **keywords)

    monkeypatch.setattr(MlflowClient, "log_batch", log_batch)
    monkeypatch.setattr(metrics, "RETRY_SECONDS", 0.1)
    with upload_metrics(tmp_path, Environment().tracking_uri, run_id):
        attempt(0, 1, 2)
    assert steps(run_id) == [1, 2]
    assert caplog.messages == ["Cannot upload metrics to MLflow; retrying: down"]
