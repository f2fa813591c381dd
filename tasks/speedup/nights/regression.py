"""Whether a run is worse than those before it: its throughput, its score, its share of time spent waiting for data.

Knows numbers only: which runs belong together, and what is done about a regression, is the flow's business.

Throughput is judged as the ratio to the control, the baseline that was timed in the same run: what slows the machine
slows both. Data wait and this ratio may differ between hosts, the score may not.

A change of level is looked for, not a difference to a neighbour: the newest 1, 2, 3 or 7 runs against the level of up
to `WINDOW` runs before them. The limit is that of `prediction_limit.py`, and never below a change that matters.
Looking at levels over several runs is what finds slow decay, which no step from one run to the next shows (Fleming
et al., "Hunter: Using Change Point Detection to Hunt for Performance Regressions", 2023).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeGuard

import numpy as np
from pydantic import Field

from paceline.conf.lightning import Objective
from paceline.tasks.formatting import enumerate_words
from paceline.tasks.measure.validity import MAX_FOREIGN_CORES
from paceline.tasks.records.record import Record
from paceline.tasks.records.training import ScoreName
from paceline.tasks.scores import SCORE, SCORE_WORDS, own_name
from paceline.tasks.speedup.nights.confirmation import Confirmation
from paceline.tasks.speedup.nights.prediction_limit import SPANS, Level, level_of, location

Measure = Literal["throughput", "score", "data wait"]
WINDOW = 120
"""Runs that the level before is taken from, at most. Fewer would know the effects of hosts less well, and miss losses
(`tests/benchmarks/simulate_nights.py`); more would hold a change for the better against later runs for longer."""
MIN_BEFORE = 6  # fewest runs before a judgement is made
SECONDS_PER_DAY = 86400.0
MAX_GAP_DAYS = 31
"""Longest time between two runs of a series. After more, machine and libraries are others: the history starts again."""
FOUND = 0.8
"""Alarm limits of throughput, as a share of the loss to be found. At the loss itself half of them would be found."""


class RunMetrics(Record):
    """Metrics of one run of a series; None where unknown."""

    run_id: str
    throughput: float | None = None  # training samples per second, steady state
    score: float | None = None  # on the test split; of own code the metric that it logged
    data_wait: float | None = None  # share of the training steps' time spent waiting for data
    baseline_throughput: float | None = None  # control: samples/s of the probe's baseline; None: no undisturbed one
    host: str = ""  # hosts of its ranks; runs that do not know theirs count as of one host
    start_time: float | None = None  # Unix seconds
    item_seconds: dict[str, float] = Field(default_factory=dict)
    """Seconds per training sample, by item of the time budget; what adds up to a step."""
    foreign_cores: float | None = None  # cores that other processes used during the training
    contaminated: bool = False
    """Others used the machine in another way: no measure for later runs, and itself judged by its score alone.
    `judge` adds those with more foreign cores than usual."""
    regressed: bool = False  # found worse than those before it, or not comparable: no measure for later runs either


class Tolerances(Record):
    """Changes that matter; a single run must show twice as much."""

    throughput: float = 0.05
    """Loss to be found within three runs, as a share of the ratio to the control before; twice as much in one run."""
    score: float = 0.01  # loss, in absolute terms; of a metric of own code as a share
    data_wait: float = 0.05  # rise, in absolute terms
    foreign_cores: float = MAX_FOREIGN_CORES
    """Rise from which on others have disturbed a run. What is busy every night belongs to the machine."""


class Change(Record):
    """One measure that has become worse."""

    measure: Measure
    name: str  # of the measure in words: of a score its own, such as accuracy
    value: float  # location of the newest runs; of the throughput, samples/s at tonight's speed of the baseline
    expected: float  # level of the runs before, in the same unit
    limit: float  # limit of the alarm, in the same unit
    ratio: float | None = None  # throughput only: `value` over the baseline's throughput in the same run
    expected_ratio: float | None = None
    limit_ratio: float | None = None
    num_runs: int  # newest runs that show it
    num_before: int  # runs that it is compared with


class RegressionVerdict(Record):
    """Verdict on a run."""

    verdict: Literal["regression", "normal", "too few runs", "disturbed", "not comparable"]
    """`disturbed`: the run was slower while other processes used the machine, so it is not judged."""
    changes: tuple[Change, ...] = ()  # of a regression empty where a metric of own code has no value any more
    grew: str | None = None  # item of the time budget that took most of a lost throughput
    confirmation: Confirmation | None = None  # None unless `track.on_regression=confirm` or `bisect` made one
    text: str  # one or more sentences: what, by how much, against how many runs, and why as far as it is known

    @property
    def tag(self) -> str:
        """Tag of the run: the measures that got worse, `none`, or why it was not judged."""
        if self.verdict == "regression":
            return ", ".join(change.name for change in self.changes) or SCORE
        return self.verdict if self.verdict in ("disturbed", "not comparable") else "none"


@dataclass(frozen=True)
class _Scale:
    """Scale of a measure: larger is worse."""

    measure: Measure
    margin: float
    name: str
    sign: int = 1  # of a score: -1 where smaller is better

    def group(self, run: RunMetrics) -> str:
        """The host of a run, where the measure depends on it."""
        return "" if self.measure == "score" else run.host

    def badness(self, value: float) -> float:
        """On a scale where noise is even."""
        if self.measure == "throughput":
            return -math.log(value)
        return value if self.measure == "data wait" else -self.sign * value

    def back(self, badness: float) -> float:
        """The measure itself."""
        if self.measure == "throughput":
            return math.exp(-badness)
        return badness if self.measure == "data wait" else -self.sign * badness


def judge(
    runs: Sequence[RunMetrics], margins: Tolerances | None = None, score: ScoreName | Objective | None = "accuracy"
) -> RegressionVerdict:
    """Compare the newest run with those before it; of a metric of own code, the tolerance is a share of its level."""
    margins = margins or Tolerances()
    foreign_cores = [run.foreign_cores for run in runs[:-1] if run.foreign_cores is not None]
    usual = float(np.median(foreign_cores)) if foreign_cores else 0.0
    gap, runs = _since_gap(runs)
    runs = [
        run.model_copy(update={"contaminated": True})
        if (run.foreign_cores or 0.0) - usual > margins.foreign_cores
        else run
        for run in runs
    ]
    quality = _Scale("score", margins.score, SCORE_WORDS[score] if isinstance(score, str) else SCORE)
    if isinstance(score, Objective):
        known = [abs(value) for run in runs[:-1] if is_measure(run) and (value := _value(run, "score")) is not None]
        quality = _Scale("score", margins.score * float(np.median(known or [1.0])), own_name(score), score.sign)
    scales = (
        _Scale("throughput", -math.log1p(-FOUND * margins.throughput), "throughput"),
        quality,
        _Scale("data wait", margins.data_wait, "data wait"),
    )
    newest, before = runs[-1], [run for run in runs[:-1] if is_measure(run)]
    judged = []
    for scale in scales:
        hosts = [scale.group(run) for run in before if _value(run, scale.measure) is not None]
        if _value(newest, scale.measure) is not None and scale.group(newest) in _hosts_to_judge_on(hosts):
            judged.append(scale.name)
    notes = _reasons_not_to_judge(scales, newest, before)
    if not judged:
        text = "; ".join([gap or f"{len(before)} comparable runs before it; from {MIN_BEFORE} on it is judged", *notes])
        return RegressionVerdict(verdict="too few runs", text=text)
    changes = tuple(change for scale in scales if scale.name in judged and (change := _worst(scale, runs)) is not None)
    before = before[-WINDOW:]
    if not changes:
        text = f"{enumerate_words(judged)} as in the {len(before)} runs before it"
        raw = _raw_change(newest, before) if "throughput" in judged else []
        return RegressionVerdict(verdict="normal", text="; ".join([text, *raw, *notes]))
    causes = []
    grew = _grew(newest, before) if any(change.measure != "score" for change in changes) else None
    if grew is not None:
        item, usual, now = grew
        causes.append(f"{item.replace('_', ' ')} grew from {_per_sample(usual)} to {_per_sample(now)} a sample")
    if any(change.measure == "throughput" for change in changes):
        causes += _raw_change(newest, before, at_least=0.0)
    if newest.contaminated:
        causes.append("others used the machine while it was measured")
    text = "; ".join([*(_describe_change(change) for change in changes), *causes, *notes])
    certain = tuple(change for change in changes if change.measure == "score" or not newest.contaminated)
    return RegressionVerdict(
        verdict="regression" if certain else "disturbed",
        changes=certain or changes,
        grew=grew[0] if grew else None,
        text=text,
    )


def _since_gap(runs: Sequence[RunMetrics]) -> tuple[str, Sequence[RunMetrics]]:
    """The runs since the last long gap, and a sentence on a gap that few runs have followed."""
    for index in range(len(runs) - 1, 0, -1):
        earlier, later = runs[index - 1].start_time, runs[index].start_time
        days = 0.0 if earlier is None or later is None else (later - earlier) / SECONDS_PER_DAY
        if days > MAX_GAP_DAYS:
            since = f"{len(runs) - index - 1} runs since; from {MIN_BEFORE} on it is judged"
            return f"after {days:.0f} days without a run the history starts again: {since}", runs[index:]
    return "", runs


def _hosts_to_judge_on(hosts: Sequence[str]) -> set[str]:
    """Hosts that a run can be judged on, from those of the runs before; none if they are too few.

    One host alone in the window says nothing of how hosts differ, so one that ran longer ago does not count.
    """
    window = set(hosts[-WINDOW:]) if len(hosts) >= MIN_BEFORE else set[str]()
    return set(hosts) if len(window) > 1 else window


def _reasons_not_to_judge(scales: Sequence["_Scale"], newest: RunMetrics, before: Sequence[RunMetrics]) -> list[str]:
    """Why a throughput that is known is not judged, and on which host nothing that depends on it is."""
    if len(before) < MIN_BEFORE or newest.throughput is None:
        return []
    if _value(newest, "throughput") is None:
        return ["throughput is not judged: the run has timed no undisturbed baseline to compare it with"]
    controls = sum(_value(run, "throughput") is not None for run in before)
    if controls < MIN_BEFORE:
        timed = f"{controls} of the {len(before)} runs before it have timed their baseline"
        return [f"throughput is not judged: {timed}; from {MIN_BEFORE} on it is"]
    if newest.host not in _hosts_to_judge_on([run.host for run in before if _value(run, "throughput") is not None]):
        names = [scale.name for scale in scales if scale.measure != "score"]
        return [f"{enumerate_words(names)} are not judged: the runs before it were not on {newest.host}"]
    return []


def is_measure(run: RunMetrics) -> bool:
    """Whether later runs may be measured by it."""
    return not run.contaminated and not run.regressed


def _value(run: RunMetrics, measure: Measure) -> float | None:
    if measure == "throughput":
        rate, control = run.throughput, run.baseline_throughput
        return rate / control if _is_rate(rate) and _is_rate(control) else None
    value = run.score if measure == "score" else run.data_wait
    return value if value is not None and math.isfinite(value) else None


def _is_rate(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value) and value > 0


def _worst(scale: _Scale, runs: Sequence[RunMetrics]) -> Change | None:
    """Over the shortest span that shows a change."""
    measured = [(run, scale.badness(value)) for run in runs if (value := _value(run, scale.measure)) is not None]
    earlier = [pair for pair in measured[:-1] if not pair[0].contaminated]
    for span in SPANS:
        first = len(earlier) - (span - 1)
        before = [(scale.group(run), badness) for run, badness in earlier[: max(0, first)] if is_measure(run)]
        judged_on = _hosts_to_judge_on([host for host, _ in before])
        newest = [*earlier[first:], measured[-1]]
        is_judged = all(scale.group(run) in judged_on for run, _ in newest)
        if is_judged and (change := _compare(scale, level_of(before[-WINDOW:]), newest)) is not None:
            return change
    return None


def _compare(scale: _Scale, level: Level, newest: Sequence[tuple[RunMetrics, float]]) -> Change | None:
    hosts = [scale.group(run) for run, _ in newest]
    above = [badness - level.expect(host) for host, (_, badness) in zip(hosts, newest, strict=True)]
    limit = max(level.reach(hosts), scale.margin * (2 if len(newest) == 1 else 1))
    excess = location(above, level.noise)
    if excess <= limit or above[-1] <= limit / 2:  # the last one must show it too: it may be fixed
        return None
    expected = level.expect(hosts[-1])
    ends = [scale.back(expected + distance) for distance in (excess, 0.0, limit)]
    control = newest[-1][0].baseline_throughput if scale.measure == "throughput" else None
    ratios = ends if control else [None] * len(ends)
    value, usual, alarm = (end * (control or 1.0) for end in ends)
    return Change(
        measure=scale.measure,
        name=scale.name,
        value=value,
        expected=usual,
        limit=alarm,
        num_runs=len(newest),
        num_before=level.num_runs,
        ratio=ratios[0],
        expected_ratio=ratios[1],
        limit_ratio=ratios[2],
    )


def _grew(newest: RunMetrics, before: Sequence[RunMetrics]) -> tuple[str, float, float] | None:
    """The item of a step that took most of what was lost, with its seconds per sample before and now.

    Seconds before are those at tonight's speed of the baseline, where it is known.
    """
    timed = [run for run in before if run.item_seconds]
    controls = [(run.baseline_throughput, newest.baseline_throughput) for run in timed]
    paces = [then / tonight if _is_rate(then) and _is_rate(tonight) else 1.0 for then, tonight in controls]
    usual = {
        item: float(np.median([run.item_seconds.get(item, 0.0) * pace for run, pace in zip(timed, paces, strict=True)]))
        for item in (newest.item_seconds if timed else ())
    }
    item = max(usual, key=lambda name: newest.item_seconds[name] - usual[name], default="")
    now = newest.item_seconds.get(item, 0.0)
    return (item, usual[item], now) if item and now > usual[item] else None


def _describe_change(change: Change) -> str:
    newest = "" if change.num_runs == 1 else f" over the last {change.num_runs} runs"
    against = f"of the {change.num_before} runs before"
    if change.ratio is not None and change.expected_ratio is not None and change.limit_ratio is not None:
        loss = 1 - change.ratio / change.expected_ratio
        return (
            f"throughput{newest} {_round(change.value)} samples/s, {change.ratio:.3g} times the baseline of the same "
            f"run: {loss:.0%} below the {change.expected_ratio:.3g} times {against} (alarm below "
            f"{change.limit_ratio:.3g})"
        )
    direction = "below" if change.value < change.expected else "above"
    if change.measure == "score" and change.name not in SCORE_WORDS.values():
        return (
            f"{change.name}{newest} {change.value:.4g}, {direction} the {change.expected:.4g} {against} "
            f"(alarm {direction} {change.limit:.4g})"
        )
    return (
        f"{change.name}{newest} {change.value:.1%}, {abs(change.value - change.expected) * 100:.1f} points "
        f"{direction} the {change.expected:.1%} {against} (alarm {direction} {change.limit:.1%})"
    )


def _round(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"  # noqa: PLR2004


def _raw_change(newest: RunMetrics, before: Sequence[RunMetrics], at_least: float = 0.1) -> list[str]:
    """Throughput as it was timed and the baseline's, against their medians; empty where the change is small."""
    controls = [(run.throughput, run.baseline_throughput) for run in before]
    pairs = [(rate, control) for rate, control in controls if _is_rate(rate) and _is_rate(control)]
    rate, control = newest.throughput, newest.baseline_throughput
    if not pairs or not _is_rate(rate) or not _is_rate(control):
        return []
    usual, usual_control = np.median(pairs, axis=0)
    if abs(rate / usual - 1) < at_least:
        return []
    return [
        f"raw throughput {_round(rate)} samples/s, {rate / usual - 1:+.0%} against the median of these runs; the "
        f"baseline changed by {control / usual_control - 1:+.0%}"
    ]


def _per_sample(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"  # noqa: PLR2004
