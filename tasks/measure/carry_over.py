"""Carry-over: whether what ran before an arm changes its time, for one arm more than for the other.

Senn, "Cross-over Trials in Clinical Research" (2002), chapters 3 and 10. In the palindromes A B | B A each arm follows
the other one in every second round and itself in the others. Call the extra time of A after B a, and that of B after A
b, both as logarithms. Drift and common noise aside, log A + log B is larger by a in rounds with A second, and by b in
those with B second, and the mean of log A - log B is off by (a - b) / 2. So the alternation of the sums shows how far
off the ratio is. It is estimated by least squares with a straight line for the drift.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import scipy

from paceline.tasks.measure.paired_ratio import MIN_ROUNDS, Interval
from paceline.tasks.records.measurement import Block

LEVEL = 0.05


@dataclass(frozen=True)
class CarryOver:
    """Effect of the order of the arms on their ratio."""

    bias: float  # share by which the ratio is too high, negative where it is too low
    p_value: float

    @property
    def significant(self) -> bool:
        """Whether the ratio is off by more than chance, at 5 %."""
        return self.p_value <= LEVEL


def carry_over(rounds: Iterable[Iterable[Block]], slow: str, fast: str) -> CarryOver | None:
    """Carry-over in the throughput of `fast` over that of `slow`; None with fewer than six rounds of both in turn."""
    sums, places = [], []
    for blocks in rounds:
        seconds = {block.arm: block.seconds_per_sample for block in blocks}  # in the order they ran
        if slow in seconds and fast in seconds:
            sums.append(np.log(seconds[slow]) + np.log(seconds[fast]))
            order = list(seconds)
            places.append(0.5 if order.index(slow) > order.index(fast) else -0.5)
    count = len(sums)
    if count < MIN_ROUNDS or len(set(places)) == 1:
        return None
    design = np.column_stack([np.asarray(places), np.ones(count), np.arange(count)])
    inverse = np.linalg.inv(design.T @ design)
    coefficients = inverse @ design.T @ np.asarray(sums)
    square = float(np.sum((sums - design @ coefficients) ** 2)) / (count - 3)
    error = max(1e-9, float(np.sqrt(square * inverse[0, 0])))  # times have no more digits
    p_value = float(2 * scipy.special.stdtr(count - 3, -abs(coefficients[0]) / error))
    return CarryOver(float(np.expm1(coefficients[0] / 2)), p_value)


def allow_for(ratio: Interval, effect: CarryOver | None) -> Interval:
    """Widen the interval so that it also holds the ratio without a significant carry-over."""
    if effect is None or not effect.significant or ratio.low is None or ratio.high is None:
        return ratio
    without = 1 + effect.bias
    low, high = min(ratio.low, ratio.low / without), max(ratio.high, ratio.high / without)
    return Interval(value=ratio.value, low=low, high=high)
