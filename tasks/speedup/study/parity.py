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
    them do not make it smaller. Training is chaotic: the repeats differ among each other. The larger of both standard
    errors counts, the second one with Student's t.

    The verdict is that of a non-inferiority test: `worse` when the interval lies below 0 and the loss is above the
    margin, `better` when it lies above 0, `on par` when its low end is above minus the margin, else `undecided`.

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
    reach = max(sampling_reach, _repeat_reach(differences))
    return _judge(value, reach, margin)


def score_parity(pairs: Sequence[tuple[float, float]], margin: float = MARGIN) -> tuple[Interval | None, Parity]:
    """The same of a score that is not a share of right samples, such as mean IoU or SSIM.

    Each repeat brings its difference with the standard error that the choice of test samples gives it. That choice is
    the same in all repeats, so more of them do not make it smaller.
    """
    if not pairs:
        return None, "unknown"
    differences, errors = np.array(pairs, dtype=np.float64).T
    sampling = float(stats.norm.ppf(0.975) * np.sqrt(np.square(errors).mean()))
    return _judge(float(differences.mean()), max(sampling, _repeat_reach(differences)), margin)


def _judge(value: float, reach: float, margin: float) -> tuple[Interval, Parity]:
    interval = Interval(value=value, low=value - reach, high=value + reach)
    return interval, _verdict(value, value - reach, value + reach, margin)


def _repeat_reach(differences: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    if len(differences) < MIN_REPEATS:
        return 0.0
    error = differences.std(ddof=1) / np.sqrt(len(differences))
    return float(stats.t.ppf(0.975, len(differences) - 1) * error)


def _verdict(value: float, low: float, high: float, margin: float) -> Parity:
    if low >= -margin:
        return "better" if low > 0 else "on par"
    return "worse" if high < 0 and value < -margin else "undecided"
