"""Quality of what is told of every pixel: from the statistics that ranks keep for each test sample.

Their order is that of `tasks.model.task`. Shapes: N samples, S statistics, K classes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from tasks.errors import RunError
from tasks.evaluate.metrics import read_predictions
from tasks.quality import ious, mean_iou
from tasks.records import EvaluateResult, PreparedSet, TrainResult


def evaluate_statistics(train: TrainResult, prepared: PreparedSet) -> EvaluateResult:
    """Measure the quality of a segmentation or a denoising.

    Args:
        train: Names the ranks' files.
        prepared: The set.

    Raises:
        RunError: A test sample is missing, repeated or unknown, or a number is not finite.
    """
    started = time.perf_counter()
    num_samples = prepared.num_test
    if num_samples == 0:
        raise RunError("num_test=0; quality needs test samples; raise data.test_fraction")
    statistics_NS = read_predictions(train.predictions, num_samples).kept
    totals = statistics_NS.sum(axis=0).tolist()
    if train.score_name == "mean_iou":
        facts = _of_classes(totals[1:], prepared.class_names)
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


def _of_classes(counts: Sequence[float], class_names: Sequence[str]) -> dict[str, Any]:
    num_classes = len(class_names)
    right, there = counts[:num_classes], counts[2 * num_classes :]
    return {
        "accuracy": sum(right) / max(1.0, sum(there)),
        "per_class_accuracy": {
            name: both / pixels if pixels else None
            for name, both, pixels in zip(class_names, right, there, strict=True)
        },
        "mean_iou": mean_iou(counts),
        "per_class_iou": dict(zip(class_names, ious(counts), strict=True)),
    }
