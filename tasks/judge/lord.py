"""The level of each candidate of a ledger, so that at most 5 % of all that are kept are false.

LORD++ (Ramdas, Yang, Wainwright and Jordan, "Online control of the false discovery rate with decaying memory", 2017,
section 3): the first candidate gets a part of the wealth, and each KEEP pays for later ones. Theorem 2 of that paper:
where a candidate that is not better is kept with at most the chance of its level, whatever came before it, the expected
number of false keeps is at most 5 % of the expected number of keeps at any time (mFDR); where the candidates are
independent also the expected share (FDR). A level depends on earlier outcomes alone and is spent over all looks of a
judgement (`paceline.tasks.judge.decision`), which is all that the theorem asks of sequential p-values.

The weights fall as j^-1.6, as in SAFFRON (Ramdas, Zrnic, Wainwright and Jordan, 2018): the sequence of LORD itself
starts at an eighth of their level, and is above them only after some fifty candidates without a KEEP.
"""

from collections.abc import Sequence

import scipy

FALSE_KEEP_RATE = 0.05
START_WEALTH = FALSE_KEEP_RATE / 2
DECAY = 1.6


def weight(age: int) -> float:
    """Share of a wealth that is spent on the candidate so many places behind its source; all together 1."""
    return float(age**-DECAY / scipy.special.zeta(DECAY))


def next_level(kept: Sequence[bool]) -> float:
    """Level of the next candidate, given which of the earlier ones were kept."""
    place = len(kept) + 1
    ages = [place - number for number, is_kept in enumerate(kept, 1) if is_kept]
    level = START_WEALTH * weight(place)
    if ages:
        level += (FALSE_KEEP_RATE - START_WEALTH) * weight(ages[0])
    return level + FALSE_KEEP_RATE * sum(map(weight, ages[1:]))
