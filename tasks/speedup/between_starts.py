"""Interval for the next start of a run, from how earlier starts of the same work on the same kind of device scattered.

A probe sees one process. From start to start the ratio moves more: memory, caches and threads lie elsewhere. The log of
a start's ratio scatters about the true one with a variance that earlier starts show, the noise inside a process
included, so (own - true) / s is Student's t with as many degrees of freedom as there are earlier starts, less one.
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

from paceline.tasks.measure.paired_ratio import FIXED_CONFIDENCE, Estimate

MIN_STARTS = 4
"""Fewest earlier starts to borrow from. Their interval is 1.6 times as wide as with a known variance."""
MAX_STARTS = 30


def across_starts(ratio: Estimate, earlier: Sequence[float]) -> Estimate | None:
    """Widen the interval of one process by the variance between starts; None with too few earlier ratios."""
    if ratio.low is None or ratio.high is None or len(earlier) < MIN_STARTS:
        return None
    spread = float(np.log(np.asarray(earlier[-MAX_STARTS:])).std(ddof=1))
    count = len(earlier[-MAX_STARTS:])
    reach = math.exp(float(stats.t.ppf((1 + FIXED_CONFIDENCE) / 2, count - 1)) * spread)
    return Estimate(ratio.value, min(ratio.low, ratio.value / reach), max(ratio.high, ratio.value * reach))
