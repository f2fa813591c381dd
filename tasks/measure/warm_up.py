"""Rounds of a probe that belong to the warm-up: the part before a change point in the time of all arms together.

After the first steps a process may still become faster for seconds: clock rates, caches, allocators. Barrett et al.
("Virtual Machine Warmup Blows Hot and Cold", 2017) find change points by PELT, which needs hundreds of values. For the
6 to 24 rounds of a probe it is the likelihood-ratio test for one shift of the mean at an unknown place (Worsley, "On
the Likelihood Ratio Test for a Shift in Location of Normal Populations", 1979), by Bonferroni over the places, again on
what is left. The test is one of independent values. On a shared machine neighbouring rounds are alike, so the standard
error is inflated as that of autoregressive noise, by the lag-1 autocorrelation around both means. Three rules come on
top: only a fall counts, it must be one of 1 % or more, and a straight line must not explain the times as well, as a
drift falls on all arms alike and needs no trimming.

It does not bias the ratio. The value of a round is the mean of the logarithms of its arms' times, which does not change
when two arms swap theirs: given these values, the signs of the rounds' log-ratios are as random as before.
"""

import math
from collections.abc import Sequence

import numpy as np
import scipy

from paceline.tasks.measure.paired_ratio import MAX_AUTOCORRELATION, ROUNDS_PER_LOOK, autocorrelation
from paceline.tasks.records.measurement import Block

LEVEL = 0.01  # chance to drop rounds of a machine that is steady
LEAST_LEFT = 0.25  # share of the rounds; where single rounds take long, fewer can be low by chance
MIN_FALL = 0.01  # of the logarithm of the times; less cannot shift the ratio by more


def num_warm_up(rounds: Sequence[Sequence[Block]]) -> int:
    """Number of leading rounds to leave out for all arms alike: complete palindromes, 0 for none."""
    arms = set.intersection(*({block.arm for block in blocks} for blocks in rounds))  # those of all rounds
    logs = ([math.log(block.seconds_per_sample) for block in blocks if block.arm in arms] for blocks in rounds)
    slowness = np.array([np.mean(values) for values in logs])
    dropped, least_left = 0, max(2, math.ceil(LEAST_LEFT * len(rounds)))
    while True:  # drop what comes before the likeliest fall of the mean, if it is a significant one
        values = slowness[dropped:]
        count = len(values)
        splits = np.arange(ROUNDS_PER_LOOK, count - least_left + 1, ROUNDS_PER_LOOK)
        if not len(splits):
            return dropped
        between = np.cumsum(values - values.mean())[splits - 1] ** 2 / (splits * (count - splits))
        split = int(splits[np.argmax(between)])  # what lies between the means is largest where the rest is least
        size = values[:split].mean() - values[split:].mean()
        if size < MIN_FALL:
            return dropped
        residuals = np.concatenate([values[:split] - values[:split].mean(), values[split:] - values[split:].mean()])
        square, line = np.sum(residuals**2), np.polyval(np.polyfit(np.arange(count), values, 1), np.arange(count))
        share = min(MAX_AUTOCORRELATION, max(0.0, autocorrelation(residuals) or 0.0))
        inflation = (1 + share) / (1 - share)
        error = math.sqrt(inflation * square / (count - 2) * (1 / split + 1 / (count - split)))
        p_value = len(splits) * scipy.special.stdtr(count - 2, -size / max(error, 1e-12))
        if square > np.sum((values - line) ** 2) or p_value > LEVEL:
            return dropped
        dropped += split
