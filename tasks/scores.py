"""Quality of a model, in numbers and in words.

Intersection over union (Jaccard 1912): of the pixels of a class that are predicted or present, the share that are both.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeGuard, get_args

from paceline.conf.lightning import Objective
from paceline.conf.plugins import Task
from paceline.tasks.errors import InputError, RankError
from paceline.tasks.formatting import number_text
from paceline.tasks.names import Metric
from paceline.tasks.records.training import EvaluateResult, ScoreName

SCORE_WORDS: dict[ScoreName, str] = {"accuracy": "accuracy", "mean_iou": "mean IoU", "ssim": "SSIM"}
SCORE_OF_TASK: dict[Task, ScoreName] = {"classify": "accuracy", "segment": "mean_iou", "denoise": "ssim"}
"""What models of each task are judged by, as `paceline.tasks.model.objectives` measures it."""
SCORE = "score"  # what the scores of different tasks have in common


def is_share(name: str) -> TypeGuard[ScoreName]:
    """Whether a score of this name is one of Paceline's, from 0 to 1, and not a metric of own Lightning code."""
    return name in get_args(ScoreName)


def own_name(objective: Objective) -> str:
    """The name of a metric of own Lightning code as a score, which is none of Paceline's."""
    return f"logged {objective.name}" if is_share(objective.name) else objective.name


def score_text(name: str | None, value: float | None) -> str:
    """A score for people."""
    return number_text(value, ".2%" if name is None or is_share(name) else ".4g")


def score_word(names: Iterable[str | None]) -> str:
    """The word for the scores of several models, as in the head of a column."""
    distinct = {name for name in names if name is not None} or {"accuracy"}
    if len(distinct) > 1:
        return SCORE
    (name,) = distinct
    return SCORE_WORDS[name] if is_share(name) else name


def logged_score(metrics: Mapping[str, float], named: Objective | None) -> tuple[Objective, float] | None:
    """Metric and value that compare trainings of own Lightning code: the named one, or the only validation loss.

    Raises:
        InputError: the named one was not logged.
        RankError: its value is not finite.
    """
    if named is None:
        named = only_loss(metrics)
        if named is None:
            return None
    elif named.name not in metrics:
        fault = f"--{named.goal} {named.name}: the training has logged no such number"
        hint = f"name one of {', '.join(metrics)}" if metrics else "call self.log in your module"
        raise InputError(fault, hint=hint, setting=f"--{named.goal}")
    if not math.isfinite(metrics[named.name]):
        raise RankError(f"{named.name}, as your module logged it last, is not finite", final=True)
    return named, metrics[named.name]


def only_loss(names: Iterable[str]) -> Objective | None:
    """The only validation loss among the metrics of own Lightning code; None without one, or with several."""
    losses = [name for name in names if "val" in name.lower() and "loss" in name.lower()]
    return Objective(name=losses[0], goal="minimize") if len(losses) == 1 else None


def score_of(metrics: Mapping[str, float]) -> tuple[ScoreName, float] | None:
    """Name and value of a run's score; None without an evaluation."""
    names: tuple[ScoreName, ...] = ("mean_iou", "ssim", "accuracy")  # accuracy last: segmentations have one of pixels
    return next(((name, metrics[key]) for name in names if (key := Metric.test(name)) in metrics), None)


def ious(counts_3K: Sequence[float]) -> list[float | None]:
    """Intersection over union of each class; None for a class that is neither predicted nor present.

    `counts_3K` has the correct, the predicted and the actual pixels, each of all classes, one after the other.
    """
    third = len(counts_3K) // 3
    columns = zip(counts_3K[:third], counts_3K[third : 2 * third], counts_3K[2 * third :], strict=True)
    unions = [(both, predicted + actual - both) for both, predicted, actual in columns]
    return [both / union if union else None for both, union in unions]


def mean_iou(counts_3K: Sequence[float]) -> float:
    """Mean over the classes that are predicted or present; 0 without any."""
    known_ious = [iou for iou in ious(counts_3K) if iou is not None]
    return sum(known_ious) / len(known_ious) if known_ious else 0.0


def quality_facts(result: EvaluateResult) -> list[tuple[str, str]]:
    """Names and values of what is known, the score first."""
    facts: dict[str, str | None] = {
        "mean IoU": _share(result.mean_iou),
        "SSIM": None if result.ssim is None else f"{result.ssim:.4f}",
        "pixel accuracy" if result.score_name == "mean_iou" else "accuracy": _share(result.accuracy),
        **{f"top-{k} accuracy": _share(value) for k, value in result.top_k.items()},
        "angle error (RMS)": None if result.angle_rmse_degrees is None else f"{result.angle_rmse_degrees:.1f} degrees",
    }
    if result.psnr_db is not None and result.noisy_psnr_db is not None:
        gain = result.psnr_db - result.noisy_psnr_db
        facts["PSNR"] = f"{result.psnr_db:.2f} dB ({gain:+.2f} dB over the noisy image)"
    return [(name, value) for name, value in facts.items() if value is not None]


def class_scores(result: EvaluateResult) -> tuple[str, dict[str, float | None]]:
    """Name and values of the measure per class; for pixels it also counts false positives."""
    if result.per_class_iou:
        return "IoU", result.per_class_iou
    return "accuracy", result.per_class_accuracy


def _share(value: float | None) -> str | None:
    return None if value is None else f"{value:.2%}"
