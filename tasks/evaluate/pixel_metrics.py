"""Quality of predictions per pixel, from the statistics that ranks store for each test sample.

Their order is that of `paceline.tasks.model.objectives`. Shapes: N samples, S statistics, K classes.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.tasks.errors import RunError
from paceline.tasks.evaluate.metrics import Floats, read_predictions
from paceline.tasks.records.data import PreparedSet
from paceline.tasks.records.training import EvaluateResult, ScoreName, TrainResult
from paceline.tasks.scores import ious, mean_iou


def evaluate_statistics(train: TrainResult, prepared: PreparedSet) -> EvaluateResult:
    """Measure the quality of a segmentation or a denoising.

    Raises:
        RunError: A test sample is missing, repeated or unknown, or a number is not finite.
    """
    started = time.perf_counter()
    num_samples = prepared.num_test
    if num_samples == 0:
        raise RunError("num_test=0; quality needs test samples; raise data.test_fraction")
    statistics_NS = read_predictions(train.predictions, num_samples).outputs
    totals = statistics_NS.sum(axis=0).tolist()
    facts: dict[str, Any]
    if train.score_name == "mean_iou":
        counts, names, num_classes = totals[1:], prepared.class_names, len(prepared.class_names)
        right, actual = counts[:num_classes], counts[2 * num_classes :]
        recalls = (both / pixels if pixels else None for both, pixels in zip(right, actual, strict=True))
        facts = {
            "accuracy": sum(right) / max(1.0, sum(actual)),
            "per_class_accuracy": dict(zip(names, recalls, strict=True)),
            "mean_iou": mean_iou(counts),
            "per_class_iou": dict(zip(names, ious(counts), strict=True)),
        }
    else:
        _, similar, psnr, noisy_psnr = (total / num_samples for total in totals)
        facts = {"ssim": similar, "psnr_db": psnr, "noisy_psnr_db": noisy_psnr}
    result = EvaluateResult(
        num_samples=num_samples,
        score_name=train.score_name,
        samples_per_second=train.prediction_samples_per_second,
        seconds=time.perf_counter() - started,
    )
    return result.model_copy(update=facts)


def score_difference(
    first: Sequence[str], second: Sequence[str], prepared: PreparedSet, score_name: ScoreName
) -> tuple[float, float]:
    """The score of the second set of predictions less that of the first, and its standard error.

    The samples are the same in both, so they are left out one by one in both: the jackknife (Tukey 1958; Efron and
    Stein, "The Jackknife Estimate of Variance", 1981), which only requires a smooth score. Of a mean it is the standard
    error of the mean. The files are those of `paceline.tasks.evaluate.metrics.read_predictions`.

    Raises:
        RunError: The statistics do not fit the split.
    """
    num = prepared.num_test
    before_NS, after_NS = (read_predictions(files, num).outputs for files in (first, second))
    before, after = before_NS.sum(axis=0), after_NS.sum(axis=0)
    (difference,) = _scores(after[None], num, score_name) - _scores(before[None], num, score_name)
    without_N = _scores(after - after_NS, num - 1, score_name) - _scores(before - before_NS, num - 1, score_name)
    return float(difference), float(np.sqrt((num - 1) * without_N.var()))


def _scores(totals_MS: Floats, num_samples: int, score_name: ScoreName) -> Floats:
    if score_name == "ssim":
        return totals_MS[:, 1] / max(1, num_samples)
    return np.array([mean_iou(totals) for totals in totals_MS[:, 1:].tolist()])
