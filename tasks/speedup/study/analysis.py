"""Analysis of a study's trainings, pair by pair: ratios, ladders, scaling, and differences of the time budgets."""

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.tasks.measure.paired_ratio import Interval
from paceline.tasks.speedup.study import inference
from paceline.tasks.speedup.study.pairs import StudyRuns, end_to_end, log_ratios, prediction_rate, ratio_of
from paceline.tasks.speedup.study.records import (
    ArmRun,
    ArmSummary,
    BudgetDifference,
    BudgetItem,
    Rung,
    Scaling,
    StudyArm,
)
from paceline.tasks.speedup.study.scaling import scaling

NUM_DEVICES = ("execution.num_devices", "execution.num_nodes")
SECONDS_PER_HOUR = 3600.0
MEDIANS = (
    *("samples_per_second", "flops_per_second", "of_limit", "mfu", "epoch_seconds", "end_to_end_seconds"),
    *("data_wait_fraction", "communication_fraction", "idle_fraction"),
)
"""Fields of an arm's summary that are medians of those of its runs."""


def summarise_arms(
    trainings: StudyRuns, target: float | None = None, price: float | None = None
) -> tuple[ArmSummary, ...]:
    """Summarise each arm of a study."""
    p_values = inference.adjust({arm.name: trainings.logs(arm, trainings.baseline(arm)) for arm in trainings.arms})
    return tuple(_summary(trainings, arm, target, price, p_values.get(arm.name)) for arm in trainings.arms)


def _summary(
    trainings: StudyRuns, arm: StudyArm, target: float | None, price: float | None, p_value: float | None
) -> ArmSummary:
    runs, baseline = trainings.of(arm), trainings.baseline(arm)
    logs = trainings.logs(arm, baseline)
    ratio = ratio_of(logs)
    significant = ratio.significant if ratio else None
    if significant and p_value is not None:
        significant = p_value <= inference.FAMILY_LEVEL
    fresh = trainings.fresh.ratio(arm, baseline)
    confirmed: bool | None = None
    if not arm.is_baseline and any(run.arm == arm.name and run.is_fresh for run in trainings.runs):
        confirmed = fresh is not None and fresh.low is not None and fresh.low > 1
    even = break_even(trainings.of(baseline), runs) if significant else None
    difference, parity = inference.run_parity(runs if trainings.are_comparable(arm, baseline) else [])
    medians: dict[str, Any] = {name: median_known([getattr(run, name) for run in runs]) for name in MEDIANS}
    epoch, devices = medians["epoch_seconds"], runs[0].world_size if runs else _asked_devices(arm)
    return ArmSummary(
        arm=arm,
        execution=_settings(arm),
        num_devices=devices,
        **trainings.counts(arm),
        match=trainings.verdict(arm, baseline),
        **medians,
        ratio=ratio,
        num_pairs=len(logs),
        significant=significant,
        p_value=p_value,
        confirmation=fresh,
        confirmed=confirmed,
        end_to_end_ratio=trainings.ratio(arm, baseline, end_to_end),
        break_even_epochs=even.value if even else None,
        break_even_low=even.low if even else None,
        break_even_high=even.high if even else None,
        efficiency=_efficiency(trainings, arm),
        score=_mean([run.score for run in runs]),
        accuracy_difference=difference,
        parity=parity,
        parity_margin=inference.provable_margin(difference),
        seconds_to_target=_time_to(runs, target_accuracy(trainings, arm.group) if target is None else target),
        peak_memory_bytes=max((run.peak_memory_bytes for run in runs if run.peak_memory_bytes), default=None),
        energy_joules_per_epoch=_mean([run.energy_joules / run.num_epochs for run in runs if run.energy_joules]),
        cost_per_epoch=None if price is None or epoch is None else price * devices * epoch / SECONDS_PER_HOUR,
        prediction_ratio=trainings.ratio(arm, baseline, prediction_rate),
        hit_rate=min((run.compile.hit_rate for run in runs if run.compile), default=None),
        compile_seconds=median_known([run.compile.seconds for run in runs if run.compile]),
        cause=next((run.cause for run in runs if run.cause), None),
        shares=next((run.shares for run in runs if run.shares), {}),
        score_name=runs[0].score_name if runs else None,
    )


def _settings(arm: StudyArm) -> dict[str, str]:
    return dict(override.split("=", 1) for override in arm.overrides)


def winner(arms: Sequence[ArmSummary], group: str) -> ArmSummary | None:
    """Find a group's fastest arm, else its baseline; None if that did not run.

    The arm must beat the baseline significantly and be on par. If fresh trainings do not confirm it, no arm wins: the
    second fastest was not measured again.
    """
    members = [arm for arm in arms if arm.arm.group == group]
    on_par = [arm for arm in members if inference.holds_parity(arm.parity)]
    faster = [arm for arm in on_par if arm.ratio is not None and arm.significant and arm.ratio.value > 1]
    baseline = next((arm for arm in members if arm.arm.is_baseline and arm.num_done), None)
    best = max(faster, key=lambda arm: arm.ratio.value if arm.ratio else 0.0, default=None)
    return baseline if best is None or best.confirmed is False else best


def _asked_devices(arm: StudyArm) -> int:
    return int(np.prod([int(_settings(arm).get(name, 1)) for name in NUM_DEVICES]))


def _efficiency(trainings: StudyRuns, arm: StudyArm) -> Interval | None:
    """Against the arm with the fewest devices among those that are alike otherwise."""
    single = min((other for other in trainings.arms if _rest(other) == _rest(arm)), key=_asked_devices)
    ratio = trainings.ratio(arm, single)
    return ratio and ratio.times(trainings.of(single)[0].world_size / trainings.of(arm)[0].world_size)


def _rest(arm: StudyArm) -> tuple[str, ...]:
    """The axes without the number of devices."""
    return tuple(override for override in arm.overrides if not override.startswith(NUM_DEVICES))


def break_even(baseline: Sequence[ArmRun], runs: Sequence[ArmRun]) -> Interval | None:
    """Epochs after which an arm has made up for its longer start; 0 when it starts no later, None when it never does.

    The fixed cost of a training is its start-up and what its first epoch takes above the others (compile, warm-up).
    What it costs more and what an epoch saves are means over the repeats that both have, and the interval is Fieller's.
    """
    by_repeat = {run.repeat: run for run in baseline}
    costs, savings = [], []
    for run in runs:
        base = by_repeat.get(run.repeat)
        before = None if base is None else _fixed_seconds(base)
        after = _fixed_seconds(run)
        if base is not None and before is not None and after is not None and base.epoch_seconds and run.epoch_seconds:
            costs.append(after - before)
            savings.append(base.epoch_seconds - run.epoch_seconds)
    if not costs:
        return None
    cost, saving = statistics.fmean(costs), statistics.fmean(savings)
    if cost <= 0:
        return Interval(value=0.0) if saving >= 0 else None
    if saving <= 0:
        return None
    interval = inference.ratio_of_means(costs, savings)
    if interval is None or interval.low is None:
        return Interval(value=cost / saving)
    return interval.model_copy(update={"low": max(0.0, interval.low)})


def _fixed_seconds(run: ArmRun) -> float | None:
    if run.startup_seconds is None or run.first_epoch_seconds is None or run.epoch_seconds is None:
        return None
    return run.startup_seconds + max(0.0, run.first_epoch_seconds - run.epoch_seconds)


def target_accuracy(trainings: StudyRuns, group: str) -> float | None:
    """The lowest validation score with which a baseline run of the group ended; None without validation."""
    baselines = [arm for arm in trainings.arms if arm.is_baseline and arm.group == group]
    runs = [run for arm in baselines for run in trainings.of(arm) if run.validation]
    return min((run.validation[-1][1] for run in runs), default=None)


def _time_to(runs: Sequence[ArmRun], target: float | None) -> float | None:
    if target is None:
        return None
    reached = [next((at for at, value in run.validation if value >= target), None) for run in runs]
    return median_known(reached) if sum(at is not None for at in reached) * 2 >= len(runs) else None


def ladder(trainings: StudyRuns) -> tuple[tuple[Rung, ...], Interval | None]:
    """The contribution of each factor, and what all give together over the product of what each gives alone."""
    rungs = sorted((arm for arm in trainings.arms if arm.rung is not None), key=lambda arm: arm.rung or 0)
    if len(rungs) < 2:  # noqa: PLR2004  a base and one factor
        return (), None
    alone = {arm.factor: arm for arm in trainings.arms if arm.rung is None} | {rungs[1].factor: rungs[1]}
    contributions = tuple(
        Rung(
            factor=arm.factor or "",
            contribution=trainings.ratio(arm, below),
            alone=trainings.ratio(alone[arm.factor], rungs[0]) if arm.factor in alone else None,
        )
        for below, arm in itertools.pairwise(rungs)
    )
    singles = [alone[arm.factor] for arm in rungs[1:] if arm.factor in alone]
    return contributions, _interaction(trainings, rungs, singles)


def _interaction(trainings: StudyRuns, rungs: Sequence[StudyArm], alone: Sequence[StudyArm]) -> Interval | None:
    """Repeat by repeat: log of the whole, less the logs of the single factors."""
    combination = (rungs[-1], *alone)
    if len(alone) != len(rungs) - 1 or not all(trainings.are_comparable(arm, rungs[0]) for arm in combination):
        return None
    logs_of = [
        {base.repeat: log_ratios([(base, run)]) for base, run in trainings.pairs(arm, rungs[0])} for arm in combination
    ]
    common = sorted(set.intersection(*({repeat for repeat, logs in repeats.items() if logs} for repeats in logs_of)))
    combined, *parts = logs_of
    logs = [combined[repeat][0] - sum(factor[repeat][0] for factor in parts) for repeat in common]
    return ratio_of(logs)


def budget_differences(trainings: StudyRuns) -> tuple[BudgetDifference, ...]:
    """For each arm that matches its baseline: which item of the time budget gave or took how many seconds."""
    differences = []
    for arm in trainings.arms:
        baseline = trainings.baseline(arm)
        if not trainings.are_comparable(arm, baseline):
            continue
        before, after = (_mean_budget(trainings.of(side)) for side in (baseline, arm))
        items = [
            BudgetItem(item=name, baseline_seconds=before.get(name, 0.0), seconds=after.get(name, 0.0))
            for name in dict.fromkeys([*before, *after])
        ]
        items.sort(key=lambda item: -abs(item.difference))
        total = sum(item.difference for item in items)
        differences.append(BudgetDifference(arm=arm.name, baseline=baseline.name, items=tuple(items), difference=total))
    return tuple(differences)


def _mean_budget(runs: Sequence[ArmRun]) -> dict[str, float]:
    names = dict.fromkeys(name for run in runs for name in run.time_budget)
    return {name: sum(run.time_budget.get(name, 0.0) for run in runs) / len(runs) for name in names}


def scalings(trainings: StudyRuns) -> tuple[Scaling, ...]:
    """One scaling for each set of arms that differ in their number of devices and in nothing else."""
    results = []
    for axes in dict.fromkeys(_rest(arm) for arm in trainings.arms):
        arms = [arm for arm in trainings.arms if _rest(arm) == axes and trainings.of(arm)]
        single = next((arm for arm in arms if trainings.of(arm)[0].world_size == 1), None)
        if single is None or len(arms) < 2:  # noqa: PLR2004  scaling is about at least two numbers of devices
            continue
        speedups: dict[int, list[float]] = {}
        kinds = set()
        for arm in arms:
            verdict = None if arm is single else trainings.verdict(arm, single)
            if verdict is None or not verdict.matches:
                continue
            kinds.add(verdict.scaling)
            if logs := trainings.logs(arm, single):
                speedups[trainings.of(arm)[0].world_size] = [float(np.exp(log)) for log in logs]
        if speedups and len(kinds) == 1:
            results.append(scaling("weak" if kinds == {"weak"} else "strong", ", ".join(axes), speedups))
    return tuple(results)


def median_known(values: Sequence[float | None]) -> float | None:
    """The median of those that are known; None without any."""
    numbers = [value for value in values if value is not None]
    return statistics.median(numbers) if numbers else None


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return statistics.fmean(numbers) if numbers else None
