"""Whether a run is worse than those before it: its throughput, its score, its share of time spent waiting for data.

Knows numbers only: which runs belong together, and what is done about a regression, is the flow's business.

A change of level is looked for, not a difference to a neighbour: the median of the newest 1, 3 or 7 runs against that
of up to `WINDOW` runs before them. The limit is a prediction limit on robust statistics,

    t(QN_EFFICIENCY (n - 1), 1 - LEVEL) * Qn * sqrt(v_m + pi / (2 n)),

n the number of runs before, Qn their scale (Rousseeuw and Croux, "Alternatives to the Median Absolute Deviation",
1993; its efficiency, hence the degrees of freedom), v_m the variance of the median of m normal values, pi / (2 n) that
of the median before. It is never below a change that matters, and a single run must show twice that: one bad night
happens, two of three do not. Looking at levels over several runs is what finds slow decay, which no step from one run
to the next shows (Fleming et al., "Hunter: Using Change Point Detection to Hunt for Performance Regressions", 2023).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import Field
from scipy import stats

from paceline.tasks.measure.validity import MAX_FOREIGN_CORES
from paceline.tasks.records.record import Record
from paceline.tasks.records.training import ScoreName
from paceline.tasks.scores import SCORE_WORDS

Measure = Literal["throughput", "score", "data wait"]
WINDOW = 30  # runs that the level before is taken from, at most
MIN_BEFORE = 6  # fewest runs before a judgement is made
LEVEL = 1e-4
"""One-sided level of a single comparison. A nightly series has three thousand a year, most of which overlap."""
SPANS = {1: 1.0, 3: 0.449, 7: 0.210}
"""Newest runs whose median is compared, and the variance of the median of as many standard normal values."""
QN_EFFICIENCY = 0.82
_SMALL_QN = {2: 0.399, 3: 0.994, 4: 0.512, 5: 0.844, 6: 0.611, 7: 0.857, 8: 0.669, 9: 0.872}
_QN = 2.2219
SAME_CAUSE = 0.5  # share of a loss from which on the baseline's own loss explains it


class RunMetrics(Record):
    """Metrics of one run of a series; None where unknown."""

    run_id: str
    throughput: float | None = None
    """Training samples per second, steady state."""
    score: float | None = None
    """On the test split."""
    data_wait: float | None = None
    """Share of the training steps' time spent waiting for data."""
    baseline_throughput: float | None = None
    """Samples per second of the probe's baseline."""
    item_seconds: dict[str, float] = Field(default_factory=dict)
    """Seconds per training sample, by item of the time budget; what adds up to a step."""
    foreign_cores: float | None = None
    """Cores that other processes used during the training."""
    contaminated: bool = False
    """Others used the machine in another way: no measure for later runs, and itself judged by its score alone.
    `judge` adds those with more foreign cores than usual."""
    regressed: bool = False
    """Was found worse than those before it, or was not comparable: no measure for later runs either."""


class Tolerances(Record):
    """Changes that matter; a single run must show twice as much."""

    throughput: float = 0.05
    """Loss, as a share of the throughput before."""
    score: float = 0.01
    """Loss, in absolute terms."""
    data_wait: float = 0.05
    """Rise, in absolute terms."""
    foreign_cores: float = MAX_FOREIGN_CORES
    """Rise from which on others have disturbed a run. What is busy every night belongs to the machine."""


class Change(Record):
    """One measure that has become worse."""

    measure: Measure
    name: str
    """Of the measure in words: of a score its own, such as accuracy."""
    value: float
    """Median of the newest runs."""
    expected: float
    """Median of the runs before."""
    limit: float
    """Limit of the alarm."""
    num_runs: int
    """Newest runs that show it."""
    num_before: int
    """Runs that it is compared with."""


class RegressionVerdict(Record):
    """Verdict on a run."""

    verdict: Literal["regression", "normal", "too few runs", "disturbed", "not comparable"]
    """`disturbed`: the run was slower while other processes used the machine, so it is not judged."""
    changes: tuple[Change, ...] = ()
    grew: str | None = None
    """Item of the time budget that took most of a lost throughput."""
    text: str
    """One or more sentences: what, by how much, against how many runs, and why as far as it is known."""

    @property
    def tag(self) -> str:
        """Tag of the run: the measures that got worse, `none`, or why it was not judged."""
        if self.verdict == "regression":
            return ", ".join(change.name for change in self.changes)
        return self.verdict if self.verdict in ("disturbed", "not comparable") else "none"


@dataclass(frozen=True)
class _Scale:
    """Scale of a measure: larger is worse."""

    measure: Measure
    margin: float
    name: str

    def badness(self, value: float) -> float:
        """On a scale where noise is even."""
        if self.measure == "throughput":
            return -math.log(value)
        return value if self.measure == "data wait" else -value

    def back(self, badness: float) -> float:
        """The measure itself."""
        if self.measure == "throughput":
            return math.exp(-badness)
        return badness if self.measure == "data wait" else -badness


def judge(
    runs: Sequence[RunMetrics], margins: Tolerances | None = None, score_name: ScoreName = "accuracy"
) -> RegressionVerdict:
    """Compare the newest run with those before it."""
    margins = margins or Tolerances()
    foreign_cores = [run.foreign_cores for run in runs[:-1] if run.foreign_cores is not None]
    usual = float(np.median(foreign_cores)) if foreign_cores else 0.0
    runs = [
        run.model_copy(update={"contaminated": True})
        if (run.foreign_cores or 0.0) - usual > margins.foreign_cores
        else run
        for run in runs
    ]
    scales = (
        _Scale("throughput", -math.log1p(-margins.throughput), "throughput"),
        _Scale("score", margins.score, SCORE_WORDS[score_name]),
        _Scale("data wait", margins.data_wait, "data wait"),
    )
    newest, before = runs[-1], [run for run in runs[:-1] if is_measure(run)]
    judged = [
        scale.name
        for scale in scales
        if _value(newest, scale.measure) is not None
        and sum(_value(run, scale.measure) is not None for run in before) >= MIN_BEFORE
    ]
    if not judged:
        text = f"{len(before)} comparable runs before it; from {MIN_BEFORE} on it is judged"
        return RegressionVerdict(verdict="too few runs", text=text)
    changes = tuple(change for scale in scales if (change := _worst(scale, runs)) is not None)
    if not changes:
        text = f"{_enumerate(judged)} as in the {min(len(before), WINDOW)} runs before it"
        return RegressionVerdict(verdict="normal", text=text)
    before = before[-WINDOW:]
    grew = _grew(newest, before) if changes[0].measure != "score" else None
    text = "; ".join([*(_describe_change(change) for change in changes), *_causes(changes, newest, before, grew)])
    certain = tuple(change for change in changes if change.measure == "score" or not newest.contaminated)
    return RegressionVerdict(
        verdict="regression" if certain else "disturbed",
        changes=certain or changes,
        grew=grew[0] if grew else None,
        text=text,
    )


def _enumerate(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def scale_qn(values: Sequence[float]) -> float:
    """Qn, a robust standard deviation: an order statistic of the distances of all pairs. Consistent at the normal."""
    array = np.asarray(values, dtype=np.float64)
    num = len(array)
    first, second = np.triu_indices(num, 1)
    half = num // 2 + 1
    distance = float(np.sort(np.abs(array[first] - array[second]))[half * (half - 1) // 2 - 1])
    correction = _SMALL_QN.get(num) or num / (num + (1.4 if num % 2 else 3.8))
    return _QN * correction * distance


def is_measure(run: RunMetrics) -> bool:
    """Whether later runs may be measured by it."""
    return not run.contaminated and not run.regressed


def _value(run: RunMetrics, measure: Measure) -> float | None:
    value = {"throughput": run.throughput, "score": run.score, "data wait": run.data_wait}[measure]
    usable = value is not None and math.isfinite(value) and (value > 0 or measure != "throughput")
    return value if usable else None


def _worst(scale: _Scale, runs: Sequence[RunMetrics]) -> Change | None:
    """Over the shortest span that shows a change."""
    measured = [(run, scale.badness(value)) for run in runs if (value := _value(run, scale.measure)) is not None]
    if not measured or measured[-1][0] is not runs[-1]:
        return None
    earlier = [pair for pair in measured[:-1] if not pair[0].contaminated]
    for span in SPANS:
        first = len(earlier) - (span - 1)
        before = [badness for run, badness in earlier[: max(0, first)] if is_measure(run)][-WINDOW:]
        if len(before) < MIN_BEFORE:
            break
        newest = [badness for _, badness in [*earlier[first:], measured[-1]]]
        if (change := _compare(scale, before, newest)) is not None:
            return change
    return None


def _compare(scale: _Scale, before: list[float], newest: list[float]) -> Change | None:
    expected, value, num = float(np.median(before)), float(np.median(newest)), len(before)
    quantile = float(stats.t.isf(LEVEL, QN_EFFICIENCY * (num - 1)))
    reach = quantile * scale_qn(before) * math.sqrt(SPANS[len(newest)] + math.pi / (2 * num))
    limit = expected + max(reach, scale.margin * (2 if len(newest) == 1 else 1))
    if value <= limit or newest[-1] <= (expected + limit) / 2:  # the last one must show it too: it may be fixed
        return None
    return Change(
        measure=scale.measure,
        name=scale.name,
        value=scale.back(value),
        expected=scale.back(expected),
        limit=scale.back(limit),
        num_runs=len(newest),
        num_before=num,
    )


def _grew(newest: RunMetrics, before: Sequence[RunMetrics]) -> tuple[str, float, float] | None:
    """The item of a step that took most of what was lost, with its seconds per sample before and now."""
    usual = {
        item: float(np.median([run.item_seconds.get(item, 0.0) for run in before if run.item_seconds]))
        for item in newest.item_seconds
        if any(run.item_seconds for run in before)
    }
    if not usual:
        return None
    item = max(usual, key=lambda name: newest.item_seconds[name] - usual[name])
    now = newest.item_seconds[item]
    return (item, usual[item], now) if now > usual[item] else None


def _describe_change(change: Change) -> str:
    newest = "" if change.num_runs == 1 else f" over the last {change.num_runs} runs"
    against = f"of the {change.num_before} runs before"
    if change.measure == "throughput":
        loss = 1 - change.value / change.expected
        return (
            f"throughput{newest} {_round(change.value)} samples/s, {loss:.0%} below the {_round(change.expected)} "
            f"{against} (alarm below {_round(change.limit)})"
        )
    direction = "below" if change.measure == "score" else "above"
    return (
        f"{change.name}{newest} {change.value:.1%}, {abs(change.value - change.expected) * 100:.1f} points "
        f"{direction} the {change.expected:.1%} {against} (alarm {direction} {change.limit:.1%})"
    )


def _round(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"  # noqa: PLR2004


def _causes(
    changes: Sequence[Change], newest: RunMetrics, before: Sequence[RunMetrics], grew: tuple[str, float, float] | None
) -> list[str]:
    causes = []
    if grew is not None:
        item, usual, now = grew
        causes.append(f"{item.replace('_', ' ')} grew from {_per_sample(usual)} to {_per_sample(now)} a sample")
    slower = next((change for change in changes if change.measure == "throughput"), None)
    if slower is not None:
        causes += _of_the_machine(slower, newest, before)
    if newest.contaminated:
        causes.append("others used the machine while it was measured")
    return causes


def _of_the_machine(slower: Change, newest: RunMetrics, before: Sequence[RunMetrics]) -> list[str]:
    """Whether the baseline, timed in the same run, shows that the machine was slower."""
    rates = [run.baseline_throughput for run in before if run.baseline_throughput]
    if newest.contaminated or not newest.baseline_throughput or len(rates) < MIN_BEFORE:
        return []  # a contaminated run: perhaps only after the baseline was timed
    usual = float(np.median(rates))
    lost, lost_here = math.log(usual / newest.baseline_throughput), math.log(slower.expected / slower.value)
    change = newest.baseline_throughput / usual - 1
    shared = lost >= SAME_CAUSE * lost_here
    advice = " as well: look at the machine first" if shared else ": look at the execution first, not at the machine"
    return [f"the baseline changed by {change:+.0%}{advice}"]


def _per_sample(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"  # noqa: PLR2004
