"""Inference over the repeats of a study: ratios of means, several arms at once, and whether an arm learns as well."""

from collections.abc import Mapping, Sequence

import numpy as np
import scipy

from paceline.tasks.measure.paired_ratio import FIXED_CONFIDENCE, MIN_INTERVAL_ROUNDS, Floats, Interval
from paceline.tasks.speedup.study.records import ArmRun, Parity

FAMILY_LEVEL = 0.05
MARGIN = 0.01  # a loss of score below one point is not counted: seeds alone move a small network by as much
MIN_REPEATS = 2

Pair = tuple[int, int, int]  # (samples right only here, samples right only in the baseline, samples) of one repeat


def ratio_of_means(numerators: Sequence[float], denominators: Sequence[float]) -> Interval | None:
    """Ratio of the means of paired values with its 95 % interval; None where the interval is not bounded.

    The interval holds every ratio r for which the mean of x - r y may be 0 by Student's t test (Fieller, "Some Problems
    in Interval Estimation", 1954). It is bounded only where the mean of y differs from 0 by that test; else any ratio
    is possible.
    """
    count = len(numerators)
    if count < MIN_INTERVAL_ROUNDS:
        return None
    above, below = np.mean(numerators), np.mean(denominators)
    (var_above, both), (_, var_below) = np.cov(numerators, denominators, ddof=1) / count
    quantile = float(scipy.special.stdtrit(count - 1, (1 + FIXED_CONFIDENCE) / 2)) ** 2
    square = below**2 - quantile * var_below
    if square <= 0:
        return None
    middle = above * below - quantile * both
    reach = np.sqrt(max(0.0, middle**2 - square * (above**2 - quantile * var_above)))
    return Interval(
        value=float(above / below), low=float((middle - reach) / square), high=float((middle + reach) / square)
    )


def adjust(log_ratios: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Adjusted p-value of each arm with enough repeats for one; an arm is significant up to `FAMILY_LEVEL`.

    The chance of any false significance in a study is at most 5 %: each arm's log-ratios over the repeats give the
    p-value of Student's t test, and Holm's procedure ("A Simple Sequentially Rejective Multiple Test Procedure", 1979)
    adjusts them. It holds however the arms depend on each other, which they do by their common baseline.
    """
    values = {name: _p_value(np.asarray(logs)) for name, logs in log_ratios.items() if len(logs) >= MIN_INTERVAL_ROUNDS}
    adjusted: dict[str, float] = {}
    largest = 0.0
    for index, name in enumerate(sorted(values, key=lambda name: values[name])):
        largest = max(largest, min(1.0, (len(values) - index) * values[name]))
        adjusted[name] = largest
    return adjusted


def _p_value(logs: Floats) -> float:
    error = float(logs.std(ddof=1)) / np.sqrt(len(logs))
    if error == 0:
        return 1.0 if logs.mean() == 0 else 0.0
    return float(2 * scipy.special.stdtr(len(logs) - 1, -abs(logs.mean()) / error))


def run_parity(runs: Sequence[ArmRun]) -> tuple[Interval | None, Parity]:
    """Difference of the score of an arm's runs, by the measure that they have (see `parity`)."""
    scored = [
        (run.score_difference, run.score_error)
        for run in runs
        if run.score_difference is not None and run.score_error is not None
    ]
    if scored:
        return score_parity(scored)
    return parity(
        [
            (run.num_gained, run.num_lost, run.num_test)
            for run in runs
            if run.num_gained is not None and run.num_lost is not None
        ]
    )


def parity(pairs: Sequence[Pair], margin: float = MARGIN) -> tuple[Interval | None, Parity]:
    """Difference of accuracy, arm minus baseline, and what to make of it.

    Two things make the difference uncertain. The test samples are a sample: the variance of a paired difference of
    proportions follows from the discordant pairs (McNemar 1947), and as all repeats have the same test samples, more of
    them do not make it smaller. Training is chaotic: the repeats differ among each other. Both variances add up, the
    second one with Student's t. One repeat says nothing of the second one, so it gets no interval and no verdict.

    The verdict is that of two one-sided tests (Schuirmann 1987): `on par` when all of the 95 % interval lies within the
    margin to both sides, which a difference of the margin or more passes in at most 2.5 %. Else it is `better` when the
    interval lies above 0, `worse` when it lies below 0 and the loss is above the margin, and `undecided`.
    """
    tested = [pair for pair in pairs if pair[2]]
    if not tested:
        return None, "unknown"
    differences = np.array([(gained - lost) / total for gained, lost, total in tested])
    # One pseudo-observation: without a single discordant pair the interval must not have width 0.
    variances = [(max(1, gained + lost) - (gained - lost) ** 2 / total) / total**2 for gained, lost, total in tested]
    return _judge(differences, np.sqrt(max(float(np.mean(variances)), 0.0)), margin)


def score_parity(pairs: Sequence[tuple[float, float]], margin: float = MARGIN) -> tuple[Interval | None, Parity]:
    """The same of a score that is not a share of right samples, such as mean IoU or SSIM.

    Each repeat brings its difference with the standard error that the choice of test samples gives it. That choice is
    the same in all repeats, so more of them do not make it smaller.
    """
    if not pairs:
        return None, "unknown"
    differences, errors = np.array(pairs, dtype=np.float64).T
    return _judge(differences, np.sqrt(np.square(errors).mean()), margin)


def _judge(differences: Floats, sampling_error: float, margin: float) -> tuple[Interval, Parity]:
    value, count = float(differences.mean()), len(differences)
    if count < MIN_REPEATS:
        return Interval(value=value), "undecided"
    sampling = float(scipy.special.ndtri(0.975) * sampling_error)
    repeats = float(scipy.special.stdtrit(count - 1, 0.975) * (differences.std(ddof=1) / np.sqrt(count)))
    reach = float(np.hypot(sampling, repeats))
    low, high = value - reach, value + reach
    interval = Interval(value=value, low=low, high=high)
    if -margin < low and high < margin:
        return interval, "on par"
    if low > 0:
        return interval, "better"
    return interval, "worse" if high < 0 and value < -margin else "undecided"


def holds_parity(verdict: Parity) -> bool:
    """Whether an arm may be called as good as its baseline: equivalence is shown, or more than that."""
    return verdict in ("on par", "better")


def provable_margin(difference: Interval | None) -> float | None:
    """Smallest margin within which the data prove an arm to be on par; None without an interval."""
    if difference is None or difference.low is None or difference.high is None:
        return None
    return max(abs(difference.low), abs(difference.high))


def own_difference(run: ArmRun, base: ArmRun) -> tuple[float, float] | None:
    """Gain of the metric of own Lightning code over the baseline's, as a share, and its standard error, see `ArmRun`.

    None where it is not known, or the baseline's is 0.
    """
    if run.objective is None or run.score is None or not base.score:
        return None
    return run.objective.sign * (run.score - base.score) / abs(base.score), 0.0


def parity_text(verdict: Parity, difference: Interval | None, unit: str = " points") -> str:
    """The verdict, and where equivalence is the question, the smallest margin that the data can prove."""
    margin = provable_margin(difference) if verdict in ("on par", "undecided") else None
    return verdict if margin is None else f"{verdict}, within {100 * margin:.1f}{unit}"
