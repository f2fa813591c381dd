"""Interval of a ratio of two means (Fieller, "Some Problems in Interval Estimation", 1954).

The interval holds every ratio r for which the mean of x - r y may be 0 by Student's t test. It is bounded only where
the mean of y differs from 0 by that test; else any ratio is possible and there is none.
"""

from collections.abc import Sequence

import numpy as np
from scipy import stats

from paceline.tasks.measure.paired_ratio import FIXED_CONFIDENCE, MIN_INTERVAL_ROUNDS, Interval


def ratio_of_means(numerators: Sequence[float], denominators: Sequence[float]) -> Interval | None:
    """Ratio of the means of paired values with its 95 % interval; None where the interval is not bounded."""
    count = len(numerators)
    if count < MIN_INTERVAL_ROUNDS:
        return None
    above, below = np.mean(numerators), np.mean(denominators)
    (var_above, both), (_, var_below) = np.cov(numerators, denominators, ddof=1) / count
    quantile = float(stats.t.ppf((1 + FIXED_CONFIDENCE) / 2, count - 1)) ** 2
    square = below**2 - quantile * var_below
    if square <= 0:
        return None
    middle = above * below - quantile * both
    reach = np.sqrt(max(0.0, middle**2 - square * (above**2 - quantile * var_above)))
    return Interval(
        value=float(above / below), low=float((middle - reach) / square), high=float((middle + reach) / square)
    )
