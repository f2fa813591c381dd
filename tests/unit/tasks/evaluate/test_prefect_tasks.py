import numpy as np
from prefect.logging import disable_run_logger

from paceline.tasks.evaluate.prefect_tasks import evaluate
from tests.support.reports import make_report, make_train


def test_evaluate_reads_a_prepared_set_and_predictions(tmp_path):
    (tmp_path / "test").mkdir()
    labels = np.arange(20) % 10
    np.save(tmp_path / "test" / "00000.labels.npy", labels)
    np.savez(tmp_path / "rank0.npz", index=np.arange(20), kept=np.eye(10, dtype=np.float32)[labels])
    prepared = make_report(None).prepared.model_copy(update={"path": str(tmp_path)})
    train = make_train(None, predictions=(str(tmp_path / "rank0.npz"),), prediction_samples_per_second=9.0)
    with disable_run_logger():
        result = evaluate.fn(train, prepared)
    assert (result.accuracy, result.num_samples, result.samples_per_second) == (1.0, 20, 9.0)
