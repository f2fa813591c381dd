"""From paired block times to a ratio with an interval that covers.

The unit is a round: one block of every arm, next to each other in time. Its log-ratio is free of whatever slows both
arms alike. The estimate is the Hodges-Lehmann location of the rounds' log-ratios (the median of all averages of two
rounds, each with itself included), and the interval is the exact inversion of Wilcoxon's signed-rank test (Hodges and
Lehmann 1963; Hollander, Wolfe and Chicken, "Nonparametric Statistical Methods", 3.2 and 3.3). It needs no shape of the
noise, only that the arms of a round may be swapped, and the alternating order of the probe brings that about.

Stopping. A probe stops as soon as its interval is narrow enough, which favours the accidentally narrow ones. So its
looks are planned (`planned_looks`), and each spends a declared part of the error (Lan and DeMets 1983; for exact levels
of ranks, Slud and Wei 1982). The intervals of all looks together hold the truth in 95 %, whatever rule chooses among
them (repeated confidence intervals: Jennison and Turnbull 1989). What is spent is exact for any symmetric noise, since
the ranks of absolute values come in random order and independent of the signs: up to 8, 10, 12, 16, 20 and 24 rounds
1.6, 2.0, 2.4, 3.2, 3.8 and 4.8 %; with plans of 40 to 300 rounds at most 4.3 %. After 24 rounds, where most probes
stop, the level is the one that bears three rounds with a burst on the same side.

Neighbouring rounds may be alike. The lag-1 autocorrelation r of the log-ratios, corrected for its bias at few rounds
(Kendall 1954), less 0.1, widens the interval by sqrt((1 + r) / (1 - r)), the inflation of the standard error of a mean
of autoregressive noise. It can only make an interval wider, which leaves the proof as it is.

Why not a bootstrap. Percentile intervals are too short at few rounds (Efron and Tibshirani 1993, chapter 14;
DiCiccio and Efron 1996; Hesterberg 2015). Share of true values covered, identical arms, the worst of the 14 kinds of
noise of `tests/support/noise.py`, 1,000 trials each (`tests/benchmarks/simulate_intervals.py`):

    rounds                                      6      8      12     24     stopped early
    percentile bootstrap of the mean            83 %   85 %   87 %   87 %   84 %
    Student t over rounds (Georges et al. 2007) 93 %   92 %   93 %   93 %   91 %
    signed rank, 95 %                           95 %   94 %   93 %   94 %   92 %
    signed rank, 98 %                           95 %   98 %   98 %   97 %   96 %
    this module                                 95 %   98 %   98 %   98 %   97 %

    true autocorrelation of the ratio           0        0.25     0.35     0.5      drift of the ratio by 3 %
    signed rank, 98 %                           97.7 %   92.5 %   89.5 %   82.9 %   92.3 %
    this module                                 98.3 %   95.9 %   94.4 %   91.4 %   96.6 %

From an autocorrelation of 0.5 on the interval is still too short.

A block counts with the total time of its steps, so that the ratio is one of throughputs. The median step is another
quantity: with steps of 3x the time in 10 % of one arm's steps and 2 % of the other's, its interval covers the ratio of
throughputs in 0 to 2 % of probes of 4 to 40 steps a block, that of the totals in 96 to 98 % (24 rounds, 400 trials,
seed 25). Where a block is a single step, over 250 ms long, both are the same, and rare slow steps count too little
(21 %).

The heavy tails between blocks are why the mean over rounds is not used: under bursts its error is 4 to 7 times that of
the Hodges-Lehmann location at 24 rounds. Hoefler and Belli ("Scientific Benchmarking of Parallel Computing Systems",
2015) ask for exactly this: medians, ranks, and no assumed normality.
"""

import math
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import scipy

from paceline.tasks.records.measurement import Block, ProbeResult, Rates
from paceline.tasks.records.record import Record

OUTER_CONFIDENCE, INNER_CONFIDENCE = 0.98, 0.988
"""Levels of the first and the last look of a probe of 24 rounds, where most probes stop, and of all the others."""
LATER_LOOKS, LAST_LOOK = 10, 24  # rounds
FIXED_CONFIDENCE = 0.95
"""The same for a number of repeats that was fixed beforehand, as in a study: nothing stops early, and trainings are
far apart. Covers 95 to 100 % at 3 to 12 repeats of 2 and 4 arms in balanced order (heavy tails, drift, bursts, 3,000
trials each, 2026-11-21; the least 94.8 %)."""
MIN_ROUNDS = 6  # fewest rounds for which a signed-rank interval can reach 95 %
MIN_ROUNDS_TO_STOP = 8
"""Fewest rounds before an early stop. Six would do for independent noise but leave little margin under autocorrelated
noise. Before the looks were planned: false alarms 4.5 %, with eight 3.7 to 3.9 % (20,000 trials each)."""
MIN_INTERVAL_ROUNDS = 3  # fewest with an interval; up to `MIN_ROUNDS` it is Student's t, wide and so honest
USUAL_AUTOCORRELATION = 0.1  # up to here the estimate is mostly chance, and the levels of the looks suffice
MAX_AUTOCORRELATION = 0.8  # that widens an interval, to three times its width
ROUNDS_PER_LOOK = 2  # looks are at least so many rounds apart: both orders (A B and B A) once, so that drift cancels

Floats = npt.NDArray[np.float64]


class Interval(Record):
    """A quantity with its 95 % interval; the ends are None with too few rounds or repeats for one."""

    value: float
    low: float | None = None
    high: float | None = None

    def times(self, factor: float) -> "Interval":
        """The quantity in another unit."""
        low, high = (None if end is None else end * factor for end in (self.low, self.high))
        return Interval(value=self.value * factor, low=low, high=high)

    @property
    def half_width(self) -> float | None:
        """Half the width of the interval relative to the value."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2 / self.value

    @property
    def significant(self) -> bool | None:
        """Whether the interval excludes 1."""
        return None if self.low is None or self.high is None else self.low > 1.0 or self.high < 1.0


def planned_looks(max_rounds: int) -> range:
    """Numbers of rounds at which a probe of at most `max_rounds` may stop: at most nine, from a third on.

    The error that the looks spend together depends on these shares of the plan, so the same level serves all plans.
    """
    first, step = (ROUNDS_PER_LOOK * math.ceil(max_rounds / part / ROUNDS_PER_LOOK) for part in (3, 12))
    return range(max(MIN_ROUNDS_TO_STOP, first), max_rounds + 1, step)


def look_confidence(num_rounds: int) -> float:
    """Level of the interval of a probe after so many rounds."""
    return OUTER_CONFIDENCE if num_rounds < LATER_LOOKS or num_rounds == LAST_LOOK else INNER_CONFIDENCE


@lru_cache(maxsize=1024)
def signed_rank_depth(num_rounds: int, confidence: float) -> int:
    """Number of smallest and of largest Walsh averages outside the interval, plus one.

    From the exact null distribution of the signed-rank sum W: the largest k with P(W <= k - 1) <= (1 - confidence) / 2,
    but at least 1 (the whole range), which at six rounds is a level of 96.9 %.
    """
    counts = np.ones(1)
    for rank in range(1, num_rounds + 1):
        counts = np.pad(counts, (0, rank)) + np.pad(counts, (rank, 0))
    return max(1, int(np.searchsorted(np.cumsum(counts / 2.0**num_rounds), (1 - confidence) / 2, side="right")))


def location_interval(differences: Floats, confidence: float | None = None) -> tuple[Floats, Floats, Floats]:
    """Location of symmetric noise and its interval, along the last axis; leading axes are separate problems.

    `confidence` is None for that of a look of a probe, `FIXED_CONFIDENCE` where the number of values was fixed before.

    Returns:
        Hodges-Lehmann location, low end, high end; each without the last axis.

    Raises:
        ValueError: Fewer than `MIN_INTERVAL_ROUNDS` values.
    """
    num_rounds = differences.shape[-1]
    if num_rounds < MIN_INTERVAL_ROUNDS:
        raise ValueError(f"num_rounds={num_rounds} gives no interval; use at least {MIN_INTERVAL_ROUNDS}")
    confidence = confidence or look_confidence(num_rounds)
    first, second = np.triu_indices(num_rounds)
    averages = np.sort((differences[..., first] + differences[..., second]) / 2, axis=-1)  # Walsh averages
    location = np.median(averages, axis=-1)
    if num_rounds < MIN_ROUNDS:
        quantile = float(scipy.special.stdtrit(num_rounds - 1, (1 + confidence) / 2))
        reach = quantile * np.std(differences, axis=-1, ddof=1) / np.sqrt(num_rounds)
        centre = np.mean(differences, axis=-1)
        return location, np.minimum(centre - reach, location), np.maximum(centre + reach, location)
    depth = signed_rank_depth(num_rounds, confidence)
    return location, averages[..., depth - 1], averages[..., -depth]


def autocorrelation(values: Floats) -> float | None:
    """Lag-1 autocorrelation, corrected for its bias; None where there are too few values.

    Values beyond three robust standard deviations count as if at that distance.
    """
    count = len(values)
    if count < MIN_ROUNDS_TO_STOP:
        return None
    residuals = values - np.median(values)
    reach = 3 * 1.4826 * float(np.median(np.abs(residuals)))
    residuals = np.clip(residuals, -reach, reach)
    residuals = residuals - residuals.mean()
    square = float(np.sum(residuals**2))
    if square <= 0:
        return 0.0
    return (count * (float(np.sum(residuals[1:] * residuals[:-1])) / square) + 1) / (count - 3)


def estimate_ratio(log_ratios: Floats, confidence: float | None = None) -> Interval | None:
    """The ratio behind log-ratios; None without any, and without an interval when they are too few.

    Without a level they are the rounds of a probe in their order, and their autocorrelation widens the interval.
    """
    if log_ratios.size == 0:
        return None
    if log_ratios.size < MIN_INTERVAL_ROUNDS:
        return Interval(value=float(np.exp(np.median(log_ratios))))
    location, low, high = location_interval(log_ratios, confidence)
    if confidence is None:  # trainings of a study are far apart
        share = min(MAX_AUTOCORRELATION, max(0.0, (autocorrelation(log_ratios) or 0.0) - USUAL_AUTOCORRELATION))
        factor = np.sqrt((1 + share) / (1 - share))
        low, high = location - factor * (location - low), location + factor * (high - location)
    return Interval(value=float(np.exp(location)), low=float(np.exp(low)), high=float(np.exp(high)))


def _log_ratios(rounds: Iterable[Iterable[Block]], slow: str, fast: str, time: str = "seconds_per_sample") -> Floats:
    """Of the rounds that have this time of both arms."""
    times = [{block.arm: getattr(block, time) for block in blocks} for blocks in rounds]
    pairs = [(one[slow], one[fast]) for one in times if None not in (one.get(slow), one.get(fast))]
    return np.asarray([np.log(first / second) for first, second in pairs], dtype=np.float64)


def arm_ratio(rounds: Iterable[Iterable[Block]], slow: str, fast: str) -> Interval | None:
    """Throughput of the arm `fast` over that of `slow`, from the rounds that have both."""
    return estimate_ratio(_log_ratios(rounds, slow, fast))


def speedup_ratio(rounds: Iterable[Iterable[Block]]) -> Interval | None:
    """Candidate's throughput over the baseline's: ratio of the blocks' total times."""
    return arm_ratio(rounds, "baseline", "candidate")


def input_share(probe: ProbeResult) -> float | None:
    """Share of the candidate's step that it waits for input: what the arm `synthetic_input` saves; None without it."""
    ratio = arm_ratio(probe.rounds, "candidate", "synthetic_input")
    return None if ratio is None else max(0.0, 1.0 - 1.0 / ratio.value)


def ratio_autocorrelation(rounds: Iterable[Iterable[Block]]) -> float | None:
    """Lag-1 autocorrelation of the rounds' ratios of candidate and baseline."""
    return autocorrelation(_log_ratios(rounds, "baseline", "candidate"))


def typical_ratio(rounds: Iterable[Iterable[Block]]) -> Interval | None:
    """The same of the typical step, the median of each block; None where it was not recorded."""
    return estimate_ratio(_log_ratios(rounds, "baseline", "candidate", "typical_seconds_per_sample"))


def round_ratios(rounds: Iterable[Iterable[Block]]) -> tuple[float, ...]:
    """Candidate's throughput over the baseline's in each single round."""
    return tuple(float(ratio) for ratio in np.exp(_log_ratios(rounds, "baseline", "candidate")))


def parallel_efficiency(rounds: Iterable[Iterable[Block]], num_devices: int) -> Interval | None:
    """Candidate's throughput over `num_devices` times that of the same execution on one device (arm `single`)."""
    return estimate_ratio(_log_ratios(rounds, "single", "candidate") - np.log(num_devices))


def joules_per_sample(rounds: Iterable[Iterable[Block]]) -> Rates:
    """Energy of a sample in the arms of a probe, joules, without the arms that have a block without energy."""
    rates: Rates = {}
    for role in ("baseline", "candidate"):
        joules = [block.joules_per_sample or np.nan for blocks in rounds for block in blocks if block.arm == role]
        if not np.isnan(joules).any() and (estimate := estimate_ratio(np.log(joules))) is not None:
            rates[role] = (estimate.value, estimate.low, estimate.high)
    return rates
