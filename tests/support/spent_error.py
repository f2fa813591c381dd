"""The error that the looks of a probe spend together."""

import numpy as np

from paceline.tasks.measure.paired_ratio import look_confidence, signed_rank_depth


def spent_error(looks, last):
    """Probability that the interval of any look, or of round `last`, misses the truth; exact for any symmetric noise.

    The ranks of independent, equally distributed absolute values are in random order and independent of the signs. So a
    state is the signs by rank; a new value takes any rank with the same probability, and either sign.
    """
    left, spent = np.ones(1), 0.0
    for count in range(1, last + 1):
        grown = np.zeros(2 * left.size)
        for rank in range(count):
            grown.reshape(-1, 2, 2**rank)[...] += left.reshape(-1, 1, 2**rank) / (2 * count)
        left = grown
        if count in looks or count == last:
            depth, sums = signed_rank_depth(count, look_confidence(count)), np.zeros(1, np.int16)
            for rank in range(1, count + 1):
                sums = np.concatenate([sums, sums + rank])
            outside = (sums < depth) | (sums > count * (count + 1) // 2 - depth)
            spent, left[outside] = spent + float(left[outside].sum()), 0.0
    return spent
