"""The four ratios of a run: over the naive baseline, over a competent loop, end to end, and of the device's limit.

Each has its interval and a sentence that says what it means, or why it is not known.
"""

from collections.abc import Sequence

import numpy as np

from paceline.conf.config import Config, RatioName
from paceline.tasks.formatting import format_seconds
from paceline.tasks.measure.paired_ratio import Interval, arm_ratio, estimate_ratio
from paceline.tasks.measure.probe import COMPETENT
from paceline.tasks.records.data import PreparedSet
from paceline.tasks.records.execution import COMPILE_LABELS, Arm
from paceline.tasks.records.measurement import CompetentCosts, ProbeResult
from paceline.tasks.records.training import Trained
from paceline.tasks.speedup.limit_share import format_share, limit_share
from paceline.tasks.speedup.records import Ratio, SpeedupResult
from paceline.tasks.speedup.verdict import format_ends, format_ratio

HEADLINES: dict[RatioName, str] = {
    "naive": "over the naive baseline",
    "competent": "over a competent PyTorch loop",
    "end_to_end": "end to end, over a competent PyTorch loop",
    "of_limit": "of what the device was measured to do",
}
MEASUREMENTS = ("probe", "limit")  # items of the time budget
NUM_BUILD_STEPS = 2  # of the loop, in the time that building it takes


def add_ratios(
    speedup: SpeedupResult, config: Config, prepared: PreparedSet | None, train: Trained, cold_seconds: float | None
) -> SpeedupResult:
    """The speedup with the four ratios, the one in the headline, and the one over one rank on all cores.

    `prepared` is None for own Lightning code. `cold_seconds` are those from the start of the run's process to its
    result; None where that had other work before.
    """
    probe, naive = train.probe, Ratio(meaning=speedup.verdict)
    if speedup.ratio is not None:
        what = f"the throughput of the naive baseline ({speedup.baseline}): what all settings gain over a plain loop"
        naive = _ratio(Interval(value=speedup.ratio, low=speedup.low, high=speedup.high), what, speedup.scope)
    loop = None if probe is None else arm_ratio(probe.rounds, COMPETENT, "candidate")
    if probe is None or probe.competent is None or loop is None or prepared is None:
        competent = end_to_end = Ratio(meaning=f"not measured: {_why_no_loop(speedup, config, probe)}")
    else:
        competent = _ratio(loop, _loop_text(probe.others[COMPETENT], probe.competent), "within this process")
        end_to_end = _end_to_end(config, prepared, train, _seconds(probe, COMPETENT), probe.competent, cold_seconds)
    ratios: dict[RatioName, Ratio] = {
        "naive": naive,
        "competent": competent,
        "end_to_end": end_to_end,
        "of_limit": _of_limit(speedup, train),
    }
    order: tuple[RatioName, ...] = (config.speedup.headline, "competent", "naive")
    equal = None if probe is None else arm_ratio(probe.rounds, "all_cores", "candidate")
    changes = {
        "ratios": ratios,
        "headline": next((name for name in order if ratios[name].value is not None), None),
        "equal_hardware": equal and _ratio(equal, "the throughput of one rank on all cores", "within this process"),
    }
    return speedup.model_copy(update=changes)


def _why_no_loop(speedup: SpeedupResult, config: Config, probe: ProbeResult | None) -> str:
    if probe is None:
        return speedup.verdict.removeprefix("not measured: ")
    if config.lightning.settings:
        return "Paceline writes no such loop for own Lightning code"
    if not config.speedup.competent_loop:
        return "speedup.competent_loop is false"
    if any(block.arm == COMPETENT for blocks in probe.warm_up for block in blocks):
        return "the rounds of the loop were warm-up and do not count"
    return probe.left_out.get(COMPETENT, f"speedup.max_seconds={config.speedup.max_seconds:g} has no time for the loop")


def _loop_text(arm: Arm, costs: CompetentCosts) -> str:
    """The words avoid `Arm.label`, whose loading is not that of the loop."""
    execution = (
        f"{arm.num_devices} device{'s' * (arm.num_devices > 1)}",
        arm.precision,
        arm.memory_format.replace("_", " "),
        COMPILE_LABELS["step" if arm.compile == "step" else "off"],
        f"{costs.num_workers} DataLoader worker{'s' * (costs.num_workers > 1)} and {costs.num_threads} threads a rank",
    )
    return (
        "the throughput of a loop that a good engineer writes in plain PyTorch, in a process without Paceline "
        f"({', '.join(execution)}), on the same network, recipe and prepared arrays"
    )


def _end_to_end(
    config: Config,
    prepared: PreparedSet,
    train: Trained,
    of_sample: Interval,
    costs: CompetentCosts,
    cold: float | None,
) -> Ratio:
    reasons = {
        "the run did not start in a process of its own": cold is None,
        "the training was interrupted": bool(train.first_step or train.restarts),
        "steps of smaller images were not timed in the loop": config.recipe.progressive_size is not None,
    }
    reason = next((reason for reason, applies in reasons.items() if applies), None)
    if reason or cold is None:
        return Ratio(meaning=f"not measured: {reason}")
    batch = prepared.num_train / (train.steps_per_epoch or 1)
    num_trained = max(0, train.num_steps - NUM_BUILD_STEPS) * batch
    num_evaluated = prepared.num_test * config.model.test_views + train.num_epochs * prepared.num_validation
    of_evaluation, start = _location(costs.evaluation_seconds), costs.start_seconds + costs.build_seconds
    rest = start + prepared.seconds + costs.record_seconds

    def over_run(trained: float | None, evaluated: float | None) -> float | None:
        if trained is None or evaluated is None:
            return None
        return (rest + num_trained * trained + num_evaluated / train.world_size * evaluated) / cold

    ratio = Interval(
        value=over_run(of_sample.value, of_evaluation.value) or 0.0,
        low=over_run(of_sample.low, of_evaluation.low),
        high=over_run(of_sample.high, of_evaluation.high),
    )
    measured = sum(train.time_budget.get(item, 0.0) for item in MEASUREMENTS)
    seconds = [ratio.value * cold, start, prepared.seconds, num_trained * of_sample.value, cold, measured]
    loop, start_text, data, steps, run, measuring = map(format_seconds, seconds)
    what = (
        f"as fast as that loop from cold start to result: the loop takes {loop} (start {start_text}, data as here "
        f"{data}, {train.num_steps:,} steps {steps}, then evaluation and recording), the run {run}, and without the "
        f"{measuring} of its measurements the ratio is {ratio.value * cold / (cold - measured):.2f}"
    )
    return _ratio(ratio, what, "of the loop's steps and evaluation")


def _of_limit(speedup: SpeedupResult, train: Trained) -> Ratio:
    share, value, low, high, interval = limit_share(train), speedup.of_limit, None, None, ""
    if value is None:
        return Ratio(meaning=f"not measured: {share.why_no_share or 'the limit is not known'}")
    step = _seconds(train.probe, "candidate") if train.probe is not None else None
    if step is not None and step.low is not None and step.high is not None:
        low, high = value * step.value / step.high, value * step.value / step.low
        interval = f" (95 % interval {format_share(low)} to {format_share(high)} of the step's time)"
    what = f"of the operations per second of a matrix product in {share.precision} on the same device"
    return Ratio(value=value, low=low, high=high, meaning=f"{format_share(value)}{interval} {what}")


def _seconds(probe: ProbeResult, role: str) -> Interval:
    return _location([block.seconds_per_sample for blocks in probe.rounds for block in blocks if block.arm == role])


def _location(seconds: Sequence[float]) -> Interval:
    estimate = estimate_ratio(np.log(np.asarray(seconds)))
    assert estimate is not None
    return estimate


def _ratio(ratio: Interval, what: str, scope: str | None) -> Ratio:
    interval = "no interval"
    if ratio.low is not None and ratio.high is not None:
        ends = format_ends(ratio.low, ratio.high, ratio.value)
        interval = " ".join(filter(None, [f"95 % interval {ends}", scope]))
    meaning = f"{format_ratio(ratio.value)} times ({interval}) {what}"
    return Ratio(value=ratio.value, low=ratio.low, high=ratio.high, meaning=meaning)
