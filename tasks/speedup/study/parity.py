"""Whether an arm learns as well as its baseline: its score over repeats that share seeds and test samples."""

from collections.abc import Sequence

import numpy as np
from scipy import stats

from paceline.tasks.measure.paired_ratio import Interval
from paceline.tasks.speedup.study.records import Parity

MARGIN = 0.01  # a loss of score below one point is not counted: seeds alone move a small network by as much
MIN_REPEATS = 2

Pair = tuple[int, int, int]  # (samples right only here, samples right only in the baseline, samples) of one repeat


def parity(pairs: Sequence[Pair], margin: float = MARGIN) -> tuple[Interval | None, Parity]:
    """Difference of accuracy, arm minus baseline, and what to make of it.

    Two things make the difference uncertain. The test samples are a sample: the variance of a paired difference of
    proportions follows from the discordant pairs (McNemar 1947), and as all repeats have the same test samples, more of
    them do not make it smaller. Training is chaotic: the repeats differ among each other. Both variances add up, the
    second one with Student's t. One repeat says nothing of the second one, so it gets no interval and no verdict.

    The verdict is that of two one-sided tests (Schuirmann 1987): `on par` when all of the 95 % interval lies within the
    margin to both sides, which a difference of the margin or more passes in at most 2.5 %. Else it is `better` when the
    interval lies above 0, `worse` when it lies below 0 and the loss is above the margin, and `undecided`.

    Args:
        pairs: One per repeat.
        margin: Largest loss that still counts as on par.
    """
    tested = [pair for pair in pairs if pair[2]]
    if not tested:
        return None, "unknown"
    differences = np.array([(gained - lost) / total for gained, lost, total in tested])
    value = float(differences.mean())
    # One pseudo-observation: without a single discordant pair the interval must not have width 0.
    variances = [(max(1, gained + lost) - (gained - lost) ** 2 / total) / total**2 for gained, lost, total in tested]
    sampling_reach = float(stats.norm.ppf(0.975) * np.sqrt(max(float(np.mean(variances)), 0.0)))
    return _judge(value, sampling_reach, _repeat_reach(differences), margin)


def score_parity(pairs: Sequence[tuple[float, float]], margin: float = MARGIN) -> tuple[Interval | None, Parity]:
    """The same of a score that is not a share of right samples, such as mean IoU or SSIM.

    Each repeat brings its difference with the standard error that the choice of test samples gives it. That choice is
    the same in all repeats, so more of them do not make it smaller.
    """
    if not pairs:
        return None, "unknown"
    differences, errors = np.array(pairs, dtype=np.float64).T
    sampling = float(stats.norm.ppf(0.975) * np.sqrt(np.square(errors).mean()))
    return _judge(float(differences.mean()), sampling, _repeat_reach(differences), margin)


def holds_parity(verdict: Parity) -> bool:
    """Whether an arm may be called as good as its baseline: equivalence is shown, or more than that."""
    return verdict in ("on par", "better")


def provable_margin(difference: Interval | None) -> float | None:
    """Smallest margin within which the data prove an arm to be on par; None without an interval."""
    if difference is None or difference.low is None or difference.high is None:
        return None
    return max(abs(difference.low), abs(difference.high))


def parity_text(verdict: Parity, difference: Interval | None) -> str:
    """The verdict, and where equivalence is the question, the smallest margin that the data can prove."""
    margin = provable_margin(difference) if verdict in ("on par", "undecided") else None
    return verdict if margin is None else f"{verdict}, within {100 * margin:.1f} points"


def _judge(value: float, sampling: float, repeats: float | None, margin: float) -> tuple[Interval, Parity]:
    if repeats is None:
        return Interval(value=value), "undecided"
    reach = float(np.hypot(sampling, repeats))
    low, high = value - reach, value + reach
    return Interval(value=value, low=low, high=high), _verdict(value, low, high, margin)


def _repeat_reach(differences: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float | None:
    if len(differences) < MIN_REPEATS:
        return None
    error = differences.std(ddof=1) / np.sqrt(len(differences))
    return float(stats.t.ppf(0.975, len(differences) - 1) * error)


def _verdict(value: float, low: float, high: float, margin: float) -> Parity:
    if -margin < low and high < margin:
        return "on par"
    if low > 0:
        return "better"
    return "worse" if high < 0 and value < -margin else "undecided"
