"""Interval for the next start of a run, from how starts of the same work differ, and the plan of what measures that.

A probe sees one process. From start to start the ratio moves more: memory, caches and threads lie elsewhere. Two
sources show by how much; both measure the logarithm of the ratio.

Measured: further processes of the same run probe again. The mean over processes has Student's t over processes as its
interval (Kalibera and Jones, "Rigorous Benchmarking in Reasonable Time", ISMM 2013). Processes have unequal numbers of
rounds, and so unequal variances. Simulated with 12 rounds in the first process and 4 in two or three others, round
noise of 2 % and starts that differ by 0 to 3 % (20,000 trials each, `tests/benchmarks/simulate_starts.py`), the
interval covers 94.8 to 95.7 %, with Satterthwaite's degrees of freedom 95.0 to 96.3 %, with weights 94.1 to 95.1 %.

Borrowed: earlier starts on the same kind of device. The ratio of this start scatters about the true one with a variance
that they show, the noise inside a process included, so (own - true) / s is Student's t with as many degrees of freedom
as there are earlier starts, less one.

A given time gives the narrowest interval with sqrt(c_process / c_round * v_round / v_process) rounds in each process,
from the costs c of a start and of a round and the variances v of these levels (Kalibera and Jones). The variance
between processes is unknown until some have been measured: until then each takes as many rounds as time allows, at most
those of the training's own probe.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import scipy

from paceline.conf.config import Speedup
from paceline.tasks.formatting import format_seconds
from paceline.tasks.measure.paired_ratio import FIXED_CONFIDENCE, Interval, round_ratios, speedup_ratio
from paceline.tasks.records.measurement import FurtherStarts, ProbeResult
from paceline.tasks.records.training import TrainResult
from paceline.tasks.speedup.records import VarianceComponents

MIN_STARTS = 4  # fewest earlier starts to borrow from. Their interval is 1.6 times as wide as with a known variance
MAX_STARTS = 30
MIN_PROCESSES = 3  # fewest, with the training's own, that give an interval: it is 2.5 standard deviations wide
MAX_SHARE = 0.05  # of the training's time for all further processes
MAX_FURTHER = 5
MIN_ROUNDS = 4  # two palindromes
IMPORT_SECONDS = 6.0  # estimate of a rank's imports, which the training's own process had done before
PATIENCE = 3.0  # times the estimate until a process that the user asked for is given up


def across_starts(ratio: Interval, earlier: Sequence[float]) -> Interval | None:
    """Widen the interval of one process by the variance between starts; None with too few earlier ratios."""
    if ratio.low is None or ratio.high is None or len(earlier) < MIN_STARTS:
        return None
    logs = np.log(np.asarray(earlier[-MAX_STARTS:]))
    reach = math.exp(float(scipy.special.stdtrit(logs.size - 1, (1 + FIXED_CONFIDENCE) / 2)) * float(logs.std(ddof=1)))
    low, high = min(ratio.low, ratio.value / reach), max(ratio.high, ratio.value * reach)
    return Interval(value=ratio.value, low=low, high=high)


def over_processes(probes: Sequence[ProbeResult]) -> Interval | None:
    """Ratio over several processes with its interval; None with too few of them."""
    logs = np.log(np.asarray(process_ratios(probes)))
    if logs.size < MIN_PROCESSES:
        return None
    centre, quantile = float(logs.mean()), scipy.special.stdtrit(logs.size - 1, (1 + FIXED_CONFIDENCE) / 2)
    reach = float(quantile * logs.std(ddof=1)) / math.sqrt(logs.size)
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
    blocks = [block for blocks in probes[0].rounds for block in blocks if block.arm in ("baseline", "candidate")]
    steps = [block.step_variance for block in blocks if block.step_variance is not None]
    step = 2 * fmean(steps) if len(steps) == len(blocks) else None
    if between is not None and step is not None:
        between = max(0.0, between - step / blocks[0].num_steps)
    return VarianceComponents(process=process, block=between, step=step)


@dataclass(frozen=True)
class NextStart:
    """One further process; none with 0 rounds."""

    reason: str = ""  # why no further one
    num_rounds: int = 0
    block_seconds: float = 0.0  # limit of its measured blocks
    seconds: float = 0.0  # limit of the process


def next_start(settings: Speedup, train: TrainResult, done: FurtherStarts) -> NextStart:
    """Plan the next process after those that are done."""
    probe, startup = train.probe, train.startup_seconds
    if settings.starts == 0 or probe is None or startup is None:
        return NextStart("speedup.starts=0" if settings.starts == 0 else "no probe to repeat")
    is_auto, num_done = settings.starts == "auto", len(done.probes)
    if is_auto and probe.validity.contaminated:
        return NextStart("the machine was disturbed during the probe")
    num_left = (MAX_FURTHER if settings.starts == "auto" else settings.starts) - num_done
    if num_left <= 0:
        return NextStart(_cost(train, done))
    spent = sum(_round_seconds(each) * len(each.rounds) for each in done.probes)
    one_round, process = _round_seconds(probe), max(0.0, done.seconds - spent) / max(1, num_done)
    if not done.probes:  # an estimate
        arms = sum(_block_seconds(probe, role) for role in ("baseline", "candidate", *probe.others))
        warm_up = max(0.0, probe.seconds - arms * len(probe.rounds)) if probe.num_repeats == 0 else 0.0
        process = IMPORT_SECONDS + startup - train.time_budget.get("search", 0.0) + warm_up
    shortest = process + MIN_ROUNDS * one_round
    budget = MAX_SHARE * train.seconds - done.seconds if is_auto else PATIENCE * num_left * shortest
    blocks = settings.max_seconds - spent
    num_needed = max(1, MIN_PROCESSES - 1 - num_done)
    num = int(min(num_left, budget // shortest, blocks // (MIN_ROUNDS * one_round)))
    if num < num_needed:
        too_long = (
            f"two processes would take about {format_seconds(num_needed * shortest)}; {MAX_SHARE:.0%} of the training "
            f"are {format_seconds(MAX_SHARE * train.seconds)}, and speedup.max_seconds={settings.max_seconds:g}"
        )
        return NextStart(_cost(train, done) if done.probes else too_long)
    affordable = min((budget / num - process) / one_round, blocks / num / one_round)
    num_rounds = min(len(probe.rounds), affordable, _best_rounds(probe, done, process / one_round))
    num_rounds = max(MIN_ROUNDS, int(num_rounds) // 2 * 2)
    return NextStart("", num_rounds, blocks / num, budget)


def _best_rounds(probe: ProbeResult, done: FurtherStarts, relative_cost: float) -> float:
    """Rounds per process by Kalibera and Jones; infinite while starts are not known to differ."""
    variance = variance_components([probe, *done.probes])
    if not variance.process or variance.block is None:
        return math.inf
    return math.ceil(math.sqrt(relative_cost * variance.block / variance.process))


def _round_seconds(probe: ProbeResult) -> float:
    return _block_seconds(probe, "baseline") + _block_seconds(probe, "candidate")


def _block_seconds(probe: ProbeResult, role: str) -> float:
    """Mean seconds of an arm's blocks."""
    blocks = [block for blocks in probe.rounds for block in blocks if block.arm == role]
    samples = probe.samples_per_step.get(role, probe.batch_size)
    return sum(block.seconds_per_sample * block.num_steps for block in blocks) * samples / max(1, len(blocks))


def _cost(train: TrainResult, done: FurtherStarts) -> str:
    return f"took {format_seconds(done.seconds)}, {done.seconds / train.seconds:.1%} of the training's time"
