"""The evaluation stage as a Prefect task."""

from pathlib import Path

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from paceline.tasks import deadline
from paceline.tasks.evaluate.metrics import evaluate_predictions, evaluate_statistics, read_test_split
from paceline.tasks.files import load_result, save_result
from paceline.tasks.records.data import PreparedSet
from paceline.tasks.records.training import EvaluateResult, TrainResult
from paceline.tasks.redact import redact_errors
from paceline.tasks.scores import class_scores, quality_facts


@task(name="evaluate", cache_policy=NO_CACHE)
@redact_errors
def evaluate(
    train: TrainResult, prepared: PreparedSet, seconds: float | None = None, directory: Path | None = None
) -> EvaluateResult:
    """Measure the quality of the ranks' predictions on the test split; TimeLimitError if it took too long."""
    log = get_run_logger()
    cache = directory and directory / "evaluated.json"
    done = load_result(cache, EvaluateResult, train.predictions) if cache else None
    if done is not None:
        log.info("The evaluation is finished already (%s)", cache)
        return done

    def measure() -> EvaluateResult:
        if train.score_name != "accuracy":
            return evaluate_statistics(train, prepared)
        truth = read_test_split(Path(prepared.path), prepared.class_names)
        return evaluate_predictions(train.predictions, truth, train.prediction_samples_per_second)

    with deadline.time_limit("limits.evaluate_seconds", seconds):
        result = deadline.within(measure)
    if cache:
        save_result(cache, result, train.predictions)
    log.info("On %d test samples: %s", result.num_samples, ", ".join(map(" ".join, quality_facts(result))))
    word, scores = class_scores(result)
    if measured := [(value, name) for name, value in scores.items() if value is not None]:
        worst, name = min(measured)
        log.info("Class of the least %s: %s, %.2f %%", word, name, 100 * worst)
    return result
