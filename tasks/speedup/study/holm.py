"""Significance of several arms at once: the chance of any false one in a study is at most 5 %.

Each arm's log-ratios over the repeats give the p-value of Student's t test, and Holm's procedure ("A Simple
Sequentially Rejective Multiple Test Procedure", 1979) adjusts them. It holds however the arms depend on each other,
which they do by their common baseline.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats

from paceline.tasks.measure.paired_ratio import MIN_INTERVAL_ROUNDS

FAMILY_LEVEL = 0.05


def adjust(log_ratios: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Adjusted p-value of each arm with enough repeats for one; an arm is significant up to `FAMILY_LEVEL`."""
    values = {name: _p_value(np.asarray(logs)) for name, logs in log_ratios.items() if len(logs) >= MIN_INTERVAL_ROUNDS}
    adjusted: dict[str, float] = {}
    largest = 0.0
    for index, name in enumerate(sorted(values, key=lambda name: values[name])):
        largest = max(largest, min(1.0, (len(values) - index) * values[name]))
        adjusted[name] = largest
    return adjusted


def _p_value(logs: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    error = float(logs.std(ddof=1)) / np.sqrt(len(logs))
    if error == 0:
        return 1.0 if logs.mean() == 0 else 0.0
    return float(2 * stats.t.sf(abs(logs.mean()) / error, len(logs) - 1))
