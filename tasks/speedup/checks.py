"""Predictions held against what was measured later, and how good they have been so far."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from tasks.speedup.forecast.records import Check, Prediction

Z = 1.96


def check(prediction: Prediction, prediction_run_id: str, run_id: str, measured: float, measured_at: float) -> Check:
    """Hold a prediction against a measured speedup over one device.

    Args:
        prediction: Made before.
        prediction_run_id: Where it is stored.
        run_id: Of the run that measured.
        measured: Its speedup over one device.
        measured_at: Unix seconds.
    """
    return Check(
        prediction_run_id=prediction_run_id,
        run_id=run_id,
        num_devices=prediction.num_devices,
        predicted=prediction.ratio,
        low=prediction.low,
        high=prediction.high,
        measured=measured,
        error=prediction.ratio / measured - 1,
        inside=prediction.low <= measured <= prediction.high,
        measured_at=measured_at,
    )


def calibration(checks: Sequence[Check]) -> dict[str, Any]:
    """How the predictions turned out: errors, and the share inside their intervals with its Wilson interval (1927)."""
    if not checks:
        return {"num_checks": 0, "verdict": "no prediction has been checked yet"}
    errors = [one.error for one in checks]
    num_inside = sum(one.inside for one in checks)
    low, high = _wilson(num_inside, len(checks))
    mean = statistics.fmean(abs(error) for error in errors)
    plural = "s" if len(checks) > 1 else ""
    return {
        "num_checks": len(checks),
        "mean_error": statistics.fmean(errors),
        "mean_absolute_error": mean,
        "share_inside": num_inside / len(checks),
        "share_inside_low": low,
        "share_inside_high": high,
        "verdict": f"{len(checks)} prediction{plural} checked: {mean:.1%} mean absolute error, "
        f"{num_inside} of {len(checks)} inside their interval",
    }


def _wilson(num_inside: int, total: int) -> tuple[float, float]:
    share = num_inside / total
    centre = (share + Z**2 / (2 * total)) / (1 + Z**2 / total)
    reach = Z * math.sqrt(share * (1 - share) / total + Z**2 / (4 * total**2)) / (1 + Z**2 / total)
    return max(0.0, centre - reach), min(1.0, centre + reach)
