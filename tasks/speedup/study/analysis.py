"""Analysis of a study's trainings: ratios with intervals, ladders, scaling, and differences of the time budgets.

Everything is computed pair by pair and then over the pairs (`trainings`); nothing here runs or draws.
"""

import itertools
import statistics
from collections.abc import Sequence

import numpy as np

from paceline.tasks.measure.paired_ratio import FIXED_CONFIDENCE, Interval, estimate_ratio
from paceline.tasks.speedup.study.fieller import ratio_of_means
from paceline.tasks.speedup.study.holm import FAMILY_LEVEL, adjust
from paceline.tasks.speedup.study.pairs import StudyRuns, as_interval, end_to_end, log_ratios, prediction_rate, steady
from paceline.tasks.speedup.study.parity import holds_parity, parity, provable_margin, score_parity
from paceline.tasks.speedup.study.records import (
    ArmRun,
    ArmSummary,
    BudgetDifference,
    BudgetItem,
    Parity,
    Rung,
    Scaling,
    StudyArm,
)
from paceline.tasks.speedup.study.scaling import scaling

NUM_DEVICES = ("execution.num_devices", "execution.num_nodes")
SECONDS_PER_HOUR = 3600.0


def summarise_arms(
    trainings: StudyRuns, target: float | None = None, price: float | None = None
) -> tuple[ArmSummary, ...]:
    """Summarise each arm of a study."""
    logs = {}
    for arm in trainings.arms:
        baseline = trainings.baseline(arm)
        verdict = trainings.verdict(arm, baseline)
        if not arm.is_baseline and verdict is not None and verdict.matches:
            logs[arm.name] = log_ratios(trainings.pairs(arm, baseline), steady)
    p_values = adjust(logs)
    return tuple(_summary(trainings, arm, target, price, p_values.get(arm.name)) for arm in trainings.arms)


def _summary(
    trainings: StudyRuns, arm: StudyArm, target: float | None, price: float | None, p_value: float | None
) -> ArmSummary:
    runs, failed = trainings.of(arm), trainings.failed_runs(arm)
    baseline = trainings.baseline(arm)
    ratio, num_pairs = (None, 0) if arm.is_baseline else trainings.ratio(arm, baseline, steady)
    predicting, _ = (None, 0) if arm.is_baseline else trainings.ratio(arm, baseline, prediction_rate)
    total_ratio, _ = (None, 0) if arm.is_baseline else trainings.ratio(arm, baseline, end_to_end)
    significant = ratio.significant if ratio else None
    if significant and p_value is not None:
        significant = p_value <= FAMILY_LEVEL
    fresh: Interval | None = None
    confirmed: bool | None = None
    if not arm.is_baseline:
        fresh = as_interval(trainings.fresh.ratio(arm, baseline, steady)[0])
        if any(run.arm == arm.name and run.is_fresh for run in trainings.runs):
            confirmed = fresh is not None and fresh.low is not None and fresh.low > 1
    even = break_even(trainings.of(baseline), runs) if ratio and significant else None
    difference, verdict = _parity(trainings, arm, baseline)
    epoch = median_known([run.epoch_seconds for run in runs])
    devices = runs[0].world_size if runs else _asked_devices(arm)
    return ArmSummary(
        arm=arm,
        execution=dict(override.split("=", 1) for override in arm.overrides),
        num_devices=devices,
        num_done=len(runs),
        num_failed=len(failed),
        error=failed[-1].error if failed else None,
        match=trainings.verdict(arm, baseline),
        run_ids=tuple(run.run_id for run in [*runs, *failed] if run.run_id),
        samples_per_second=median_known([run.samples_per_second for run in runs]),
        flops_per_second=median_known([run.flops_per_second for run in runs]),
        of_limit=median_known([run.of_limit for run in runs]),
        mfu=median_known([run.mfu for run in runs]),
        epoch_seconds=epoch,
        end_to_end_seconds=median_known([run.end_to_end_seconds for run in runs]),
        ratio=as_interval(ratio),
        num_pairs=num_pairs,
        significant=significant,
        p_value=p_value,
        confirmation=fresh,
        confirmed=confirmed,
        end_to_end_ratio=as_interval(total_ratio),
        break_even_epochs=even.value if even else None,
        break_even_low=even.low if even else None,
        break_even_high=even.high if even else None,
        efficiency=_efficiency(trainings, arm),
        score=_mean([run.score for run in runs]),
        accuracy_difference=difference,
        parity=verdict,
        parity_margin=provable_margin(difference),
        seconds_to_target=_time_to(runs, target_accuracy(trainings, arm.group) if target is None else target),
        data_wait_fraction=median_known([run.data_wait_fraction for run in runs]),
        communication_fraction=median_known([run.communication_fraction for run in runs]),
        idle_fraction=median_known([run.idle_fraction for run in runs]),
        peak_memory_bytes=max((run.peak_memory_bytes for run in runs if run.peak_memory_bytes), default=None),
        energy_joules_per_epoch=_mean([run.energy_joules / run.num_epochs for run in runs if run.energy_joules]),
        cost_per_epoch=None if price is None or epoch is None else price * devices * epoch / SECONDS_PER_HOUR,
        contaminated=sum(bool(run.contaminated) for run in runs),
        prediction_ratio=as_interval(predicting),
        hit_rate=min((run.compile.hit_rate for run in runs if run.compile), default=None),
        compile_seconds=median_known([run.compile.seconds for run in runs if run.compile]),
        cause=next((run.cause for run in runs if run.cause), None),
        shares=next((run.shares for run in runs if run.shares), {}),
        score_name=runs[0].score_name if runs else None,
    )


def winner(arms: Sequence[ArmSummary], group: str) -> ArmSummary | None:
    """Find a group's fastest arm, else its baseline; None if that did not run.

    The arm must beat the baseline significantly and be on par. If fresh trainings do not confirm it, no arm wins: the
    second fastest was not measured again.
    """
    members = [arm for arm in arms if arm.arm.group == group]
    faster = [arm for arm in members if arm.ratio is not None and arm.significant and arm.ratio.value > 1]
    faster = [arm for arm in faster if holds_parity(arm.parity)]
    baseline = next((arm for arm in members if arm.arm.is_baseline and arm.num_done), None)
    best = max(faster, key=lambda arm: arm.ratio.value if arm.ratio else 0.0, default=None)
    return baseline if best is None or best.confirmed is False else best


def _asked_devices(arm: StudyArm) -> int:
    values = dict(override.split("=", 1) for override in arm.overrides)
    return int(np.prod([int(values.get(name, 1)) for name in NUM_DEVICES]))


def _parity(trainings: StudyRuns, arm: StudyArm, baseline: StudyArm) -> tuple[Interval | None, Parity]:
    verdict = trainings.verdict(arm, baseline)
    if arm.is_baseline or verdict is None or not verdict.matches:
        return None, "unknown"
    scored = [
        (run.score_difference, run.score_error)
        for run in trainings.of(arm)
        if run.score_difference is not None and run.score_error is not None
    ]
    if scored:
        return score_parity(scored)
    counted = [
        (run.num_gained, run.num_lost, run.num_test)
        for run in trainings.of(arm)
        if run.num_gained is not None and run.num_lost is not None
    ]
    return parity(counted)


def _efficiency(trainings: StudyRuns, arm: StudyArm) -> Interval | None:
    """Against the arm with the fewest devices among those that are alike otherwise."""
    single = min((other for other in trainings.arms if _rest(other) == _rest(arm)), key=_asked_devices)
    if single.name == arm.name:
        return None
    ratio, _ = trainings.ratio(arm, single, steady)
    runs, single_runs = trainings.of(arm), trainings.of(single)
    if ratio is None or not runs or not single_runs:
        return None
    share = single_runs[0].world_size / runs[0].world_size
    low, high = (None if end is None else end * share for end in (ratio.low, ratio.high))
    return Interval(value=ratio.value * share, low=low, high=high)


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
        fixed = (_fixed_seconds(base), _fixed_seconds(run)) if base is not None else (None, None)
        if base is None or fixed[0] is None or fixed[1] is None or not base.epoch_seconds or not run.epoch_seconds:
            continue
        costs.append(fixed[1] - fixed[0])
        savings.append(base.epoch_seconds - run.epoch_seconds)
    if not costs:
        return None
    cost, saving = statistics.fmean(costs), statistics.fmean(savings)
    if cost <= 0:
        return Interval(value=0.0) if saving >= 0 else None
    if saving <= 0:
        return None
    interval = ratio_of_means(costs, savings)
    if interval is None or interval.low is None:
        return Interval(value=cost / saving)
    return interval.model_copy(update={"low": max(0.0, interval.low)})


def _fixed_seconds(run: ArmRun) -> float | None:
    if run.startup_seconds is None or run.first_epoch_seconds is None or run.epoch_seconds is None:
        return None
    return run.startup_seconds + max(0.0, run.first_epoch_seconds - run.epoch_seconds)


def target_accuracy(trainings: StudyRuns, group: str) -> float | None:
    """The lowest validation score with which a baseline run of the group ended; None without validation."""
    baseline = next((arm for arm in trainings.arms if arm.is_baseline and arm.group == group), None)
    finals = [run.validation[-1][1] for run in (trainings.of(baseline) if baseline else []) if run.validation]
    return min(finals, default=None)


def _time_to(runs: Sequence[ArmRun], target: float | None) -> float | None:
    if target is None or not runs:
        return None
    reached = [next((at for at, value in run.validation if value >= target), None) for run in runs]
    seconds_known = [seconds for seconds in reached if seconds is not None]
    return statistics.median(seconds_known) if 2 * len(seconds_known) >= len(runs) and seconds_known else None


def ladder(trainings: StudyRuns) -> tuple[tuple[Rung, ...], Interval | None]:
    """The contribution of each factor, and what all give together over the product of what each gives alone."""
    rungs = sorted((arm for arm in trainings.arms if arm.rung is not None), key=lambda arm: arm.rung or 0)
    if len(rungs) < 2:  # noqa: PLR2004  a base and one factor
        return (), None
    alone = {arm.factor: arm for arm in trainings.arms if arm.rung is None} | {rungs[1].factor: rungs[1]}
    contributions = tuple(
        Rung(
            factor=arm.factor or "",
            contribution=as_interval(trainings.ratio(arm, below, steady)[0]),
            alone=as_interval(trainings.ratio(alone[arm.factor], rungs[0], steady)[0]) if arm.factor in alone else None,
        )
        for below, arm in itertools.pairwise(rungs)
    )
    singles = [alone[arm.factor] for arm in rungs[1:] if arm.factor in alone]
    return contributions, _interaction(trainings, rungs, singles)


def _interaction(trainings: StudyRuns, rungs: Sequence[StudyArm], alone: Sequence[StudyArm]) -> Interval | None:
    """Repeat by repeat: log of the whole, less the logs of the single factors."""
    if len(alone) != len(rungs) - 1:
        return None
    verdicts = [trainings.verdict(arm, rungs[0]) for arm in (rungs[-1], *alone)]
    if any(verdict is None or not verdict.matches for verdict in verdicts):
        return None
    logs_of = [
        {base.repeat: log_ratios([(base, run)], steady) for base, run in trainings.pairs(arm, rungs[0])}
        for arm in (rungs[-1], *alone)
    ]
    common = sorted(set.intersection(*({repeat for repeat, logs in repeats.items() if logs} for repeats in logs_of)))
    combined, *parts = logs_of
    logs = [combined[repeat][0] - sum(factor[repeat][0] for factor in parts) for repeat in common]
    return as_interval(estimate_ratio(np.asarray(logs, dtype=np.float64), FIXED_CONFIDENCE))


def budget_differences(trainings: StudyRuns) -> tuple[BudgetDifference, ...]:
    """For each arm that matches its baseline: which item of the time budget gave or took how many seconds."""
    differences = []
    for arm in trainings.arms:
        baseline = trainings.baseline(arm)
        verdict = trainings.verdict(arm, baseline)
        if arm.is_baseline or verdict is None or not verdict.matches:
            continue
        before, after = (_mean_budget(trainings.of(side)) for side in (baseline, arm))
        items = [
            BudgetItem(item=name, baseline_seconds=before.get(name, 0.0), seconds=after.get(name, 0.0))
            for name in dict.fromkeys([*before, *after])
        ]
        items.sort(key=lambda item: -abs(item.difference))
        differences.append(
            BudgetDifference(
                arm=arm.name,
                baseline=baseline.name,
                items=tuple(items),
                difference=sum(item.difference for item in items),
            )
        )
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
            verdict = trainings.verdict(arm, single)
            if arm is single or verdict is None or not verdict.matches:
                continue
            kinds.add(verdict.scaling)
            logs = log_ratios(trainings.pairs(arm, single), steady)
            if logs:
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
