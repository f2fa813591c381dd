"""What a run writes into a real store."""

import threading
from concurrent.futures import ThreadPoolExecutor

from mlflow.tracking import MlflowClient

from paceline.tasks.records.data import PreparedSet
from paceline.tasks.track.run import RunHandle, finish, log_dataset, log_document, log_interval

NUM_RUNS, NUM_ROUNDS = 4, 5


def test_runs_that_begin_at_the_same_moment_have_one_data_set(tmp_path):
    """MLflow's store refuses all but one of them; without a second try 17 rounds of 20 had an error."""
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(uri)
    experiment = client.create_experiment("at once")
    together = threading.Barrier(NUM_RUNS)

    def begin(number: int, prepared: PreparedSet) -> str:
        run_id = client.create_run(experiment).info.run_id
        together.wait()
        handle = RunHandle(tracking_uri=uri, experiment="at once", experiment_id=experiment, run_id=run_id)
        log_dataset(handle, prepared, "digits")
        return run_id

    with ThreadPoolExecutor(NUM_RUNS) as pool:
        for round_ in range(NUM_ROUNDS):
            prepared = PreparedSet.model_construct(key="key", fingerprint=f"{round_:08x}")
            for run_id in pool.map(begin, range(NUM_RUNS), [prepared] * NUM_RUNS):
                (found,) = client.get_run(run_id).inputs.dataset_inputs
                assert found.dataset.digest == prepared.fingerprint


def test_an_interval_is_three_points_of_one_moment_and_its_newest_is_the_ratio(tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(uri)
    experiment = client.create_experiment("intervals", artifact_location=str(tmp_path))
    run_id = client.create_run(experiment).info.run_id
    handle = RunHandle(tracking_uri=uri, experiment="intervals", experiment_id=experiment, run_id=run_id)
    log_interval(handle, "speedup/interval", 1.5, 1.4, 1.7)
    points = client.get_metric_history(run_id, "speedup/interval")
    assert [point.value for point in sorted(points, key=lambda point: point.step)] == [1.4, 1.7, 1.5]
    assert len({point.timestamp for point in points}) == 1
    assert client.get_run(run_id).data.metrics == {"speedup/interval": 1.5}
    log_interval(handle, "unknown", 1.5, None, None)
    assert client.get_metric_history(run_id, "unknown") == []


def test_a_run_finishes_with_and_without_artifacts(tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(uri)
    experiment = client.create_experiment("artifacts", artifact_location=str(tmp_path / "artifacts"))
    for content in (None, "text"):
        run_id = client.create_run(experiment).info.run_id
        handle = RunHandle(tracking_uri=uri, experiment="artifacts", experiment_id=experiment, run_id=run_id)
        if content is not None:
            log_document(handle, "folder/text.txt", content)
        finish(handle, "FINISHED")
        assert client.get_run(run_id).info.status == "FINISHED"
