"""A run's speedup over runs that exist already: the baseline trained before, on another day, instead of in a probe.

What lies between two trainings (another hour, another neighbour) is in such a ratio. How much that is, only several
trainings of the baseline can tell; with fewer than `MIN_INTERVAL_ROUNDS` of them there is no interval. Knows nothing
of stores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

from tasks.records import Arm, SpeedupResult
from tasks.speedup.compare import MAX_NAMED, ComparedRow, ComparedRun, Match, compare
from tasks.speedup.comparability import world_of
from tasks.measure.statistics import FIXED_CONFIDENCE, MIN_INTERVAL_ROUNDS, Estimate

EXECUTION = ("precision", "memory_format", "compile", "loading")
"""Settings that name how a device executed a training."""
FOREIGN = "machine/foreign_cores"


def is_plain(run: ComparedRun, baseline: Arm) -> bool:
    """Whether a run was executed as the baseline is."""
    wanted = {name: getattr(baseline, name) for name in EXECUTION}
    return world_of(run.facts) == baseline.num_devices and all(
        run.facts.get(f"execution.{name}") == value for name, value in wanted.items()
    )


def speedup_across(
    now: ComparedRun, bases: Sequence[ComparedRun], match: Match, most_foreign: float, candidate: str
) -> SpeedupResult:
    """Divide a run's throughput by that of runs which did the same work.

    Args:
        now: the run, as if it were in the store.
        bases: executed alike, the newest first; at least one.
        match: verdict on two runs' facts.
        most_foreign: cores that others may have kept busy beside any of them.
        candidate: how it was executed, in words.

    Returns:
        The ratio by the geometric mean of the bases, with an interval where there are enough of them; without a ratio,
        and with the reason, where none of them can be divided by.
    """
    rows = {base.run_id: compare([base, now], match).runs[1] for base in bases}
    usable = [base for base in bases if rows[base.run_id].ratio is not None and not _is_busy(base, most_foreign)]
    if not usable:
        return _withheld("; ".join(_why_not(base, rows[base.run_id], most_foreign) for base in bases[:MAX_NAMED]))
    if _is_busy(now, most_foreign):
        return _withheld(f"{now.metrics[FOREIGN]:.2f} cores were busy with others' work beside the training", True)
    ratio = ratio_across([float(rows[base.run_id].ratio or 0) for base in usable])
    mean = math.exp(math.fsum(math.log(_rate(rows[base.run_id], base)) for base in usable) / len(usable))
    return SpeedupResult(
        ratio=ratio.value,
        low=ratio.low,
        high=ratio.high,
        significant=ratio.significant,
        verdict=_sentence(ratio, usable),
        cause=_cause(ratio),
        baseline=f"{_named(usable)}: {_executed(usable[0])}",
        candidate=candidate,
        baseline_samples_per_second=mean,
        candidate_samples_per_second=mean * ratio.value,
        contaminated=False,
        baseline_runs=tuple(base.run_id for base in usable),
    )


def ratio_across(ratios: Sequence[float]) -> Estimate:
    """One training over several of the baseline.

    Trainings scatter alike whatever their execution, in the logarithm of their throughput, so the baseline's scatter s
    of n trainings holds for the one of the candidate too: the interval is that of the difference between one further
    observation and a mean, t(n - 1) s sqrt(1 + 1 / n) to either side (the prediction interval of a normal sample).

    Args:
        ratios: the candidate's throughput over that of each training of the baseline; at least one.
    """
    logs = np.log(np.asarray(ratios))
    centre, count = float(logs.mean()), len(ratios)
    if count < MIN_INTERVAL_ROUNDS:
        return Estimate(value=math.exp(centre), low=None, high=None)
    quantile = float(stats.t.ppf((1 + FIXED_CONFIDENCE) / 2, count - 1))
    reach = quantile * float(logs.std(ddof=1)) * math.sqrt(1 + 1 / count)
    return Estimate(value=math.exp(centre), low=math.exp(centre - reach), high=math.exp(centre + reach))


def _rate(row: ComparedRow, base: ComparedRun) -> float:
    assert row.rate is not None
    return base.metrics[row.rate]


def _is_busy(run: ComparedRun, most_foreign: float) -> bool:
    return run.metrics.get(FOREIGN, 0.0) > most_foreign


def _why_not(base: ComparedRun, row: ComparedRow, most_foreign: float) -> str:
    if row.match is not None and not row.match.matches:
        fields = ", ".join(f"{one.field} {one.first} against {one.second}" for one in row.match.breaking)
        return f"run {base.run_id[:8]} did other work: {fields}"
    if _is_busy(base, most_foreign):
        return f"{base.metrics[FOREIGN]:.2f} cores were busy with others' work beside run {base.run_id[:8]}"
    return row.why_no_ratio


def _withheld(why: str, contaminated: bool | None = None) -> SpeedupResult:
    return SpeedupResult(verdict=f"not divided: {why}", cause="not divided", contaminated=contaminated)


def _named(bases: Sequence[ComparedRun]) -> str:
    return f"run {bases[0].run_id[:8]}" if len(bases) == 1 else f"{len(bases)} runs, the newest {bases[0].run_id[:8]}"


def _executed(base: ComparedRun) -> str:
    devices = world_of(base.facts)
    words = [base.facts[f"execution.{name}"] for name in EXECUTION]
    return ", ".join([f"{devices} device{'' if devices == 1 else 's'}", *words])


def _cause(ratio: Estimate) -> str | None:
    if ratio.significant is None:
        return "too few runs"
    if not ratio.significant:
        return "no measurable difference"
    return "slower" if ratio.value < 1 else None


def _sentence(ratio: Estimate, bases: Sequence[ComparedRun]) -> str:
    certain = (
        f"95 % interval {ratio.low:.2f} to {ratio.high:.2f} by how they scatter"
        if ratio.low is not None and ratio.high is not None
        else f"no interval: that takes {MIN_INTERVAL_ROUNDS} trainings of the baseline"
    )
    return (
        f"{ratio.value:.2f} times the throughput of {_named(bases)} ({certain}), on another day: no paired measurement"
    )
