"""Metrics on their way to a real store: none is lost with its process, none comes twice."""

import pytest
from mlflow.tracking import MlflowClient

from conf.site import Site
from tasks.track.metrics import MetricsWriter, system_metrics


@pytest.fixture
def run_id():
    client = MlflowClient(Site().tracking_uri)
    experiment = client.get_experiment_by_name("metrics")
    return client.create_run(
        experiment.experiment_id if experiment else client.create_experiment("metrics")
    ).info.run_id


def steps(run_id, key):
    return [metric.step for metric in MlflowClient(Site().tracking_uri).get_metric_history(run_id, key)]


def test_what_a_process_took_with_it_is_delivered_by_the_next(run_id, monkeypatch):
    uri = Site().tracking_uri
    first = MetricsWriter(uri, run_id, resumed=False)
    for step in (1, 2, 3):
        first.log({"train/loss": 1 / step}, step)
    first.close()
    assert first.undelivered() == []
    assert steps(run_id, "train/loss") == [1, 2, 3]
    away = MetricsWriter("http://127.0.0.1:1", run_id, resumed=False)
    away.log({"train/loss": 0.25}, 4)
    away.log({"system/cpu": 50.0}, 0)
    ((key, value, when, step),) = away.undelivered()
    assert (key, value, step) == ("train/loss", 0.25, 4)
    assert when > 1.7e12, "milliseconds"
    monkeypatch.setattr("tasks.track.metrics.CLOSE_SECONDS", 0.1)
    away.close()
    monkeypatch.undo()
    resumed = MetricsWriter(uri, run_id, resumed=True)
    resumed.log_again([("train/loss", 1 / 3, when, 3), *away.undelivered()])
    resumed.log({"train/loss": 0.2}, 5)
    resumed.close()
    assert steps(run_id, "train/loss") == [1, 2, 3, 4, 5]


def test_samples_of_the_machine_go_on_where_they_ended(run_id):
    uri = Site().tracking_uri
    for resumed in (False, True):
        writer = MetricsWriter(uri, run_id, resumed)
        with system_metrics(writer, uri, run_id):
            pass
        writer.close()
    assert steps(run_id, "system/cpu_utilization_percentage") == [0, 1]
