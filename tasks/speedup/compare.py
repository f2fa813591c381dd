"""Runs that exist already, side by side: divided by the first only where both did the same work undisturbed.

One run each says nothing of the noise between runs, so these ratios carry no interval; each run's own speedup does.
"""

import math
from collections.abc import Sequence

import numpy as np
import scipy
from pydantic import Field

from paceline.tasks.formatting import DASH, format_interval, number_text
from paceline.tasks.measure.paired_ratio import FIXED_CONFIDENCE, MIN_INTERVAL_ROUNDS, Interval
from paceline.tasks.names import Metric, is_contaminated
from paceline.tasks.records.execution import Arm
from paceline.tasks.records.record import Record
from paceline.tasks.records.training import ScoreName
from paceline.tasks.scores import SCORE, score_of, score_word
from paceline.tasks.speedup.comparability import differing, is_unknown, list_facts, match, world_of
from paceline.tasks.speedup.records import SpeedupResult
from paceline.tasks.speedup.study.records import MatchVerdict

RATES = (Metric.STEADY_THROUGHPUT, Metric.THROUGHPUT)
"""What is divided: after warm-up where both runs know it, else over the whole training."""
MAX_NAMED = 3


class ComparedRun(Record):
    """A run as the store knows it."""

    run_id: str
    name: str
    status: str
    start_time: float  # Unix seconds
    facts: dict[str, str] = Field(default_factory=dict)  # for a match verdict; empty for a run that never logged them
    metrics: dict[str, float] = Field(default_factory=dict)
    params: dict[str, str] = Field(default_factory=dict)
    tags: dict[str, str] = Field(default_factory=dict)

    @property
    def label(self) -> str:
        """Its name and the beginning of its id."""
        return f"{self.name} {self.run_id[:8]}"

    @property
    def contaminated(self) -> bool:
        """Whether something disturbed its probe or its training."""
        return is_contaminated(self.tags)


class ComparedRow(Record):
    """One run against the base."""

    run_id: str
    label: str
    is_base: bool
    match: MatchVerdict | None  # against the base; None for the base itself
    why_no_ratio: str  # empty where the ratios are known
    ratio: float | None = None  # samples per second over the base's; its kind is `rate`
    rate: str | None = None  # which metric was divided
    wall_ratio: float | None = None  # the base's wall time over this run's; above 1 is faster
    score_name: ScoreName | None = None
    score: float | None = None  # on the test split
    score_difference: float | None = None  # as a fraction; above 0 is better
    accuracy_difference: float | None = None  # the same where the score is the accuracy
    samples_per_second: float | None
    own_ratio: float | None  # speedup that the run measured against its own baseline
    own_low: float | None
    own_high: float | None
    over_competent: float | None = None  # throughput over the competent loop, as the run measured it
    efficiency: float | None
    data_wait_fraction: float | None
    accuracy: float | None


class Comparison(Record):
    """Runs side by side."""

    runs: tuple[ComparedRow, ...]
    differing: dict[str, tuple[str, ...]]  # settings that are not equal in all runs, with the value of each


def compare(runs: Sequence[ComparedRun]) -> Comparison:
    """Compare runs with the first one."""
    base = runs[0]
    names = dict.fromkeys(name for run in runs for name in run.facts)
    values = {name: tuple(run.facts.get(name, "unknown") for run in runs) for name in names}
    return Comparison(
        runs=tuple(_row(run, base, None if run is base else match(base.facts, run.facts)) for run in runs),
        differing={name: settings for name, settings in values.items() if len(set(settings)) > 1},
    )


def _row(run: ComparedRun, base: ComparedRun, verdict: MatchVerdict | None) -> ComparedRow:
    metrics, why, rate = run.metrics, _why_no_ratio(run, base, verdict), _rate(run, base)
    wall = base.metrics.get(Metric.WALL_SECONDS), metrics.get(Metric.WALL_SECONDS)
    divided = not why and verdict is not None
    scored, base_scored = score_of(metrics), score_of(base.metrics)
    is_same_score = divided and scored and base_scored and scored[0] == base_scored[0]
    difference = scored[1] - base_scored[1] if scored and base_scored and is_same_score else None
    name = scored[0] if scored else None
    return ComparedRow(
        run_id=run.run_id,
        label=run.label,
        is_base=verdict is None,
        match=verdict,
        why_no_ratio=why,
        rate=rate if divided else None,
        ratio=metrics[rate] / base.metrics[rate] if divided and rate else None,
        wall_ratio=wall[0] / wall[1] if divided and wall[0] and wall[1] else None,
        score_name=name,
        score=scored[1] if scored else None,
        score_difference=difference,
        accuracy_difference=difference if name == "accuracy" else None,
        samples_per_second=metrics.get(RATES[0], metrics.get(RATES[1])),
        own_ratio=metrics.get(Metric.SPEEDUP),
        own_low=metrics.get(Metric.SPEEDUP_LOW),
        own_high=metrics.get(Metric.SPEEDUP_HIGH),
        over_competent=metrics.get(Metric.OVER_COMPETENT),
        efficiency=metrics.get(Metric.EFFICIENCY),
        data_wait_fraction=metrics.get(Metric.DATA_WAIT_FRACTION),
        accuracy=metrics.get(Metric.TEST_ACCURACY),
    )


def _rate(run: ComparedRun, base: ComparedRun) -> str | None:
    return next((name for name in RATES if run.metrics.get(name) and base.metrics.get(name)), None)


def _why_no_ratio(run: ComparedRun, base: ComparedRun, verdict: MatchVerdict | None) -> str:
    if verdict is None:
        return "base"
    if not verdict.matches and is_unknown(verdict):
        return "not comparable: nothing is known of one of them"
    if not verdict.matches:
        names = [field.field for field in verdict.breaking]
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        return f"not comparable: {', '.join(names[:MAX_NAMED])}{more}"
    reasons = [f"{one.label} did not finish" for one in (base, run) if one.status != "FINISHED"]
    reasons += [f"{one.label} was disturbed" for one in (base, run) if one.contaminated]
    return next(iter(reasons), "no throughput is known of both" if _rate(run, base) is None else "")


def compare_table(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Make the head and rows for the terminal and the page."""
    word = score_word(row.score_name for row in comparison.runs)
    head = ["run", "against the first", "wall time", word, "samples/s", "own speedup", "efficiency", "data wait"]
    return head, [_cells(row, word) for row in comparison.runs]


def _cells(row: ComparedRow, word: str) -> list[str]:
    name = f"{score_word([row.score_name])} " if word == SCORE and row.score_name else ""
    score = name + number_text(row.score, ".2%")
    if row.score_difference is not None:
        score += f" ({100 * row.score_difference:+.2f} points)"
    return [
        row.label,
        number_text(row.ratio, ".2f", " x") if row.ratio is not None else row.why_no_ratio,
        number_text(row.wall_ratio, ".2f", " x"),
        score,
        number_text(row.samples_per_second, ",.0f"),
        DASH if row.own_ratio is None else format_interval(row.own_ratio, row.own_low, row.own_high),
        number_text(row.efficiency, ".2f"),
        number_text(row.data_wait_fraction, ".1%"),
    ]


def compare_notes(comparison: Comparison) -> list[str]:
    """Explain the table, its limits, and which facts differ."""
    limits = (
        "Ratios against the first run rest on one run each and have no interval: `paceline study` repeats and "
        "interleaves. Above 1 is faster."
    )
    notes = [f"{row.label}: {list_facts(row.match)}." for row in comparison.runs if row.match is not None]
    return notes if all(row.ratio is None for row in comparison.runs) else [limits, *notes]


EXECUTION = ("precision", "memory_format", "compile", "loading")  # settings that name how a device executed a training


def is_plain(run: ComparedRun, baseline: Arm) -> bool:
    """Whether a run was executed as the baseline is."""
    is_executed_so = all(run.facts.get(f"execution.{name}") == getattr(baseline, name) for name in EXECUTION)
    return is_executed_so and world_of(run.facts) == baseline.num_devices


def speedup_across(
    now: ComparedRun, bases: Sequence[ComparedRun], most_foreign: float, candidate: str
) -> SpeedupResult:
    """Divide a run's throughput by the geometric mean of those of runs which did the same work.

    There is an interval where they are enough, and a reason in place of the ratio where none can be divided by.
    """
    rows = {base.run_id: compare([base, now]).runs[1] for base in bases}
    usable = [base for base in bases if rows[base.run_id].ratio is not None and not _is_busy(base, most_foreign)]
    if not usable:
        return _withheld("; ".join(_why_not(base, rows[base.run_id], most_foreign) for base in bases[:MAX_NAMED]))
    if _is_busy(now, most_foreign):
        return _withheld(
            f"{now.metrics[Metric.FOREIGN_CORES]:.2f} cores were busy with other work during the training", True
        )
    ratio = ratio_across([float(rows[base.run_id].ratio or 0) for base in usable])
    doubts = {None: "too few runs", False: "no measurable difference"}
    rates = [base.metrics[rows[base.run_id].rate or ""] for base in usable]
    mean = math.exp(math.fsum(map(math.log, rates)) / len(rates))
    devices, execution = world_of(usable[0].facts), [usable[0].facts[f"execution.{name}"] for name in EXECUTION]
    return SpeedupResult(
        ratio=ratio.value,
        low=ratio.low,
        high=ratio.high,
        significant=ratio.significant,
        verdict=_sentence(ratio, usable),
        cause=doubts.get(ratio.significant, "slower" if ratio.value < 1 else None),
        baseline=f"{_names_of(usable)}: {devices} device{'' if devices == 1 else 's'}, {', '.join(execution)}",
        candidate=candidate,
        baseline_samples_per_second=mean,
        candidate_samples_per_second=mean * ratio.value,
        contaminated=False,
        baseline_runs=tuple(base.run_id for base in usable),
    )


def ratio_across(ratios: Sequence[float]) -> Interval:
    """One training over several of the baseline.

    Trainings scatter alike whatever their execution, in the logarithm of their throughput, so the baseline's scatter s
    of n trainings holds for the one of the candidate too: the interval is that of the difference between one further
    observation and a mean, t(n - 1) s sqrt(1 + 1 / n) to either side (the prediction interval of a normal sample).
    """
    logs = np.log(np.asarray(ratios))
    centre, count = float(logs.mean()), len(ratios)
    if count < MIN_INTERVAL_ROUNDS:
        return Interval(value=math.exp(centre))
    quantile = float(scipy.special.stdtrit(count - 1, (1 + FIXED_CONFIDENCE) / 2))
    reach = quantile * float(logs.std(ddof=1)) * math.sqrt(1 + 1 / count)
    return Interval(value=math.exp(centre), low=math.exp(centre - reach), high=math.exp(centre + reach))


def _is_busy(run: ComparedRun, most_foreign: float) -> bool:
    return run.metrics.get(Metric.FOREIGN_CORES, 0.0) > most_foreign


def _why_not(base: ComparedRun, row: ComparedRow, most_foreign: float) -> str:
    if row.match is not None and not row.match.matches:
        return f"run {base.run_id[:8]} did other work: {', '.join(differing(row.match))}"
    if _is_busy(base, most_foreign):
        return f"{base.metrics[Metric.FOREIGN_CORES]:.2f} cores were busy with other work during run {base.run_id[:8]}"
    return row.why_no_ratio


def _withheld(why: str, contaminated: bool | None = None) -> SpeedupResult:
    return SpeedupResult(verdict=f"not divided: {why}", cause="not divided", contaminated=contaminated)


def _names_of(bases: Sequence[ComparedRun]) -> str:
    return f"run {bases[0].run_id[:8]}" if len(bases) == 1 else f"{len(bases)} runs, the newest {bases[0].run_id[:8]}"


def _sentence(ratio: Interval, bases: Sequence[ComparedRun]) -> str:
    certain = (
        f"95 % interval {ratio.low:.2f} to {ratio.high:.2f} by how they scatter"
        if ratio.low is not None and ratio.high is not None
        else f"no interval: that takes {MIN_INTERVAL_ROUNDS} trainings of the baseline"
    )
    throughput = f"{ratio.value:.2f} times the throughput of {_names_of(bases)} ({certain})"
    return f"{throughput}, on another day: no paired measurement"
