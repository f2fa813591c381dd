"""Interval for the next start of a run, from how starts of the same work on the same kind of device scatter.

A probe sees one process. From start to start the ratio moves more: memory, caches and threads lie elsewhere. Two
sources show by how much; both measure the logarithm of the ratio.

Measured: further processes of the same run probe again. The mean over processes has Student's t over processes as its
interval (Kalibera and Jones, "Rigorous Benchmarking in Reasonable Time", ISMM 2013). Processes have unequal numbers of
rounds, and so unequal variances. Simulated with 12 rounds in the first process and 4 in two or three others, round
noise of 2 % and starts that differ by 0 to 3 % (20,000 trials each, `tests/benchmarks/simulate_starts.py`), the
interval covers 94.8 to 95.7 %, with Satterthwaite's degrees of freedom 95.0 to 96.3 %, with weights 94.1 to 95.1 %.

Borrowed: earlier starts. The ratio of this start scatters about the true one with a variance that they show, the noise
inside a process included, so (own - true) / s is Student's t with as many degrees of freedom as there are earlier
starts, less one.
"""

import math
from collections.abc import Sequence
from statistics import fmean

import numpy as np
from scipy import stats

from paceline.tasks.measure.paired_ratio import FIXED_CONFIDENCE, Interval, round_ratios, speedup_ratio
from paceline.tasks.records.measurement import ProbeResult
from paceline.tasks.speedup.records import VarianceComponents

MIN_STARTS = 4  # fewest earlier starts to borrow from. Their interval is 1.6 times as wide as with a known variance
MAX_STARTS = 30
ROLES = ("baseline", "candidate")
MIN_PROCESSES = 3
"""Fewest processes, the training's own included, whose scatter gives an interval: 2.5 standard deviations wide."""


def across_starts(ratio: Interval, earlier: Sequence[float]) -> Interval | None:
    """Widen the interval of one process by the variance between starts; None with too few earlier ratios."""
    if ratio.low is None or ratio.high is None or len(earlier) < MIN_STARTS:
        return None
    spread = float(np.log(np.asarray(earlier[-MAX_STARTS:])).std(ddof=1))
    count = len(earlier[-MAX_STARTS:])
    reach = math.exp(float(stats.t.ppf((1 + FIXED_CONFIDENCE) / 2, count - 1)) * spread)
    low, high = min(ratio.low, ratio.value / reach), max(ratio.high, ratio.value * reach)
    return Interval(value=ratio.value, low=low, high=high)


def over_processes(probes: Sequence[ProbeResult]) -> Interval | None:
    """Ratio over several processes with its interval; None with too few of them."""
    ratios = process_ratios(probes)
    count = len(ratios)
    if count < MIN_PROCESSES:
        return None
    values_P = np.log(np.asarray(ratios))
    centre = float(values_P.mean())
    reach = float(stats.t.ppf((1 + FIXED_CONFIDENCE) / 2, count - 1) * values_P.std(ddof=1)) / math.sqrt(count)
    return Interval(value=math.exp(centre), low=math.exp(centre - reach), high=math.exp(centre + reach))


def process_ratios(probes: Sequence[ProbeResult]) -> tuple[float, ...]:
    """Ratio of each process that has one."""
    ratios = (speedup_ratio(probe.rounds) for probe in probes)
    return tuple(ratio.value for ratio in ratios if ratio is not None)


def variance_components(probes: Sequence[ProbeResult]) -> VarianceComponents:
    """Unbiased estimates of the variances of the log-ratio by level (Kalibera and Jones 2013), cut off at 0.

    The first process, which has the most rounds, shows what is inside of processes.
    """
    logs, ratios, process = np.log(np.asarray(round_ratios(probes[0].rounds))), process_ratios(probes), None
    between = float(logs.var(ddof=1)) if logs.size > 1 else None
    if between is not None and len(ratios) >= MIN_PROCESSES:
        noise = between * fmean(1 / len(probe.rounds) for probe in probes)
        process = max(0.0, float(np.log(np.asarray(ratios)).var(ddof=1)) - noise)
    blocks = [block for blocks in probes[0].rounds for block in blocks if block.arm in ROLES]
    steps = [block.step_variance for block in blocks if block.step_variance is not None]
    step = 2 * fmean(steps) if len(steps) == len(blocks) else None
    if between is not None and step is not None:
        between = max(0.0, between - step / blocks[0].num_steps)
    return VarianceComponents(process=process, block=between, step=step)
