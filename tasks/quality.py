"""How good a model is, in numbers and in words.

Intersection over union (Jaccard 1912): of the pixels that are told or there, the share of those that are both.
"""

from __future__ import annotations

from collections.abc import Sequence

from conf.schema import Task
from tasks.records import EvaluateResult, ScoreName

SCORE_WORDS: dict[ScoreName, str] = {"accuracy": "accuracy", "mean_iou": "mean IoU", "ssim": "SSIM"}
SCORE_OF_TASK: dict[Task, ScoreName] = {"classify": "accuracy", "segment": "mean_iou", "denoise": "ssim"}
"""What models of each task are judged by, as `tasks.model.task` measures it."""


def ious(counts_3K: Sequence[float]) -> list[float | None]:
    """Of each class; None for one that is neither told nor there.

    Args:
        counts_3K: Pixels rightly told, told, and there, each of all classes.
    """
    num_classes = len(counts_3K) // 3
    right, told, there = (counts_3K[start * num_classes : (start + 1) * num_classes] for start in range(3))
    unions = [one + other - both for both, one, other in zip(right, told, there, strict=True)]
    return [both / union if union else None for both, union in zip(right, unions, strict=True)]


def mean_iou(counts_3K: Sequence[float]) -> float:
    """Over the classes that are told or there; 0 without any."""
    found = [iou for iou in ious(counts_3K) if iou is not None]
    return sum(found) / len(found) if found else 0.0


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


def _share(value: float | None) -> str | None:
    return None if value is None else f"{value:.2%}"
