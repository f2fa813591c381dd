"""The evaluate stage as a Prefect task: reads files, calls `metrics`, says what it found."""

from __future__ import annotations

from pathlib import Path

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from tasks.evaluate.metrics import evaluate_predictions, read_test_split
from tasks.records import EvaluateResult, PreparedSet, TrainResult
from tasks.redact import discreet


@task(name="evaluate", cache_policy=NO_CACHE)
@discreet
def evaluate(train: TrainResult, prepared: PreparedSet) -> EvaluateResult:
    """Measure the quality of the ranks' predictions on the test split.

    Args:
        train: Names the prediction files.
        prepared: Holds the labels.
    """
    log = get_run_logger()
    truth = read_test_split(Path(prepared.path), prepared.class_names)
    result = evaluate_predictions(train.predictions, truth, train.prediction_samples_per_second)
    top = "".join(f", top-{k} {value:.2%}" for k, value in result.top_k.items())
    log.info("Accuracy %.2f %% of %d test samples%s", 100 * result.accuracy, result.num_samples, top)
    if result.angle_rmse_degrees is not None:
        log.info("Angle error %.1f degrees (RMS)", result.angle_rmse_degrees)
    known = [(value, name) for name, value in result.per_class_accuracy.items() if value is not None]
    worst, name = min(known)
    log.info("Least accurate class: %s, %.2f %%", name, 100 * worst)
    return result
