"""The steady state of a training, after start-up and warm-up, and whether it is long enough to pay for them."""

import statistics

from paceline.tasks.measure.paired_ratio import arm_ratio
from paceline.tasks.records.measurement import ProbeResult
from paceline.tasks.records.training import TrainResult

MIN_WINDOWS = 3  # fewest windows that separate the first window from the usual ones: the median needs two others


def steady_rate(trained: TrainResult) -> float | None:
    """Samples per second over all devices: the median over the windows after warm-up.

    The first epoch is warm-up; of a single epoch, its first window. The median is not moved by a burst of other
    work that hits fewer than half of the windows.

    Returns:
        None when no window is left.
    """
    steps_per_epoch = trained.steps_per_epoch
    if not trained.windows or not steps_per_epoch:
        return None
    warm_up = steps_per_epoch if trained.num_epochs > 1 else trained.windows[0][1]
    begin = trained.first_step + warm_up
    rates = [count / seconds for first, count, seconds in trained.windows if first >= begin and seconds > 0]
    if not rates or trained.samples_per_epoch is None:
        return None
    return statistics.median(rates) * trained.samples_per_epoch / steps_per_epoch


def too_small(train: TrainResult | None) -> tuple[float, float] | None:
    """A training shorter than what comes before it: even steps of no length would not halve the run.

    Returns:
        Seconds of the start-up, with compile and warm-up, and of the rest; None when that is long enough, or the
        start-up is not known.
    """
    if train is None or train.startup_seconds is None:
        return None
    warm_up = warm_up_seconds(train) or 0.0
    startup, training = train.startup_seconds + warm_up, train.seconds - warm_up
    return (startup, training) if training < startup else None


def not_amortised(probe: ProbeResult, train: TrainResult | None) -> tuple[float, float] | None:
    """A compilation that this training is too short for.

    Returns:
        Its seconds, and at most how many all steps save by it; None when it pays, when nothing was compiled, or when no
        arm shows what a step takes without.
    """
    eager = _eager_role(probe)
    if train is None or eager is None or len(train.windows) < MIN_WINDOWS:
        return None
    # Compiled in the probe before, whose code the training found cached.
    cost = train.compile.seconds if train.compile else warm_up_seconds(train) or 0.0
    ratio = arm_ratio(probe.rounds, eager, "candidate")
    if ratio is None or ratio.high is None:
        return None
    # In doubt for the compilation: the upper end of the saving.
    saved = max(0.0, ratio.high - 1) * usual_step_seconds(train) * (train.num_steps - train.first_step)
    return (cost, saved) if cost > saved else None


def break_even_steps(train: TrainResult) -> float | None:
    """Steps after which compiling has won back what it took: its seconds over what a step saves.

    Returns:
        None when nothing was compiled, when no arm shows what a step takes without, or when none is saved.
    """
    if train.compile is None or train.probe is None or (eager := _eager_role(train.probe)) is None:
        return None
    compiled = arm_ratio(train.probe.rounds, eager, "candidate")
    if compiled is None or compiled.value <= 1 or len(train.windows) < MIN_WINDOWS:
        return None
    return train.compile.seconds / ((compiled.value - 1) * usual_step_seconds(train))


def warm_up_seconds(train: TrainResult) -> float | None:
    """Extra time of the first window of steps: compile, autotuning, cold caches. None if unknown."""
    if len(train.windows) < MIN_WINDOWS:
        return None
    _, num_steps, seconds = train.windows[0]
    return max(0.0, seconds - num_steps * usual_step_seconds(train))


def usual_step_seconds(train: TrainResult) -> float:
    """Median over the windows after the first."""
    return statistics.median(seconds / num_steps for _, num_steps, seconds in train.windows[1:])


def _eager_role(probe: ProbeResult) -> str | None:
    """The arm that differs from the compiled candidate in nothing but compilation."""
    if probe.candidate.compile == "off":
        return None
    twin = probe.candidate.model_copy(update={"compile": "off"})
    if probe.baseline == twin:
        return "baseline"
    return "uncompiled" if probe.others.get("uncompiled") == twin else None
