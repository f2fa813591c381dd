"""The steady state of a training, after start-up and warm-up, and whether it is long enough to pay for them."""

import statistics

from paceline.tasks.measure.paired_ratio import Interval, arm_ratio
from paceline.tasks.records.measurement import ProbeResult
from paceline.tasks.records.training import Trained

MIN_WINDOWS = 3  # fewest windows that separate the first window from the usual ones: the median needs two others


def steady_rate(trained: Trained) -> float | None:
    """Samples per second over all devices: the median over the windows after warm-up.

    The first epoch is warm-up; of a single epoch, its first window. The median is not moved by a burst of other work
    that hits fewer than half of the windows. None when no window is left.
    """
    if not trained.windows:
        return None
    steps_per_epoch, samples = trained.steps_per_epoch, trained.samples_per_epoch
    warm_up = steps_per_epoch if steps_per_epoch and trained.num_epochs > 1 else trained.windows[0][1]
    if not steps_per_epoch:  # a loader of own code has no length
        steps_per_epoch, samples = sum(count for _, count, _ in trained.windows), sum(trained.window_samples)
    begin = trained.first_step + warm_up
    rates = [count / seconds for first, count, seconds in trained.windows if first >= begin and seconds > 0]
    return statistics.median(rates) * samples / steps_per_epoch if rates and samples else None


def too_small(train: Trained | None) -> str:
    """Clause on a training shorter than what comes before it: even steps of no length would not halve the run.

    Compile and warm-up count as start-up. Empty where the training is long enough, or the start-up is not known.
    """
    if train is None or train.startup_seconds is None:
        return ""
    warm_up = _warm_up_seconds(train)
    startup, training = train.startup_seconds + warm_up, train.seconds - warm_up
    text = f"too small to pay: the training took {training:.1f} s, its start-up and first steps {startup:.1f} s"
    return text if training < startup else ""


def not_amortised(probe: ProbeResult, train: Trained | None) -> str:
    """Clause on a compilation that this training is too short for.

    Empty where it pays, where nothing was compiled, or where no arm shows what a step takes without.
    """
    gain = _compile_gain(probe, train) if train else None
    if train is None or gain is None or gain.high is None:
        return ""
    # Compiled in the probe before, whose code the training found cached.
    cost = train.compile.seconds if train.compile else _warm_up_seconds(train)
    # In doubt for the compilation: the upper end of the saving.
    saved = max(0.0, gain.high - 1) * _usual_step_seconds(train) * (train.num_steps - train.first_step)
    text = f"the compilation is not amortised: it cost {cost:.1f} s and saved at most {saved:.1f} s in this training"
    return text if cost > saved else ""


def break_even_steps(train: Trained) -> float | None:
    """Steps after which compiling has won back what it took: its seconds over what a step saves.

    None where nothing was compiled, where no arm shows what a step takes without, or where none is saved.
    """
    gain = _compile_gain(train.probe, train) if train.probe else None
    if train.compile is None or gain is None or gain.value <= 1:
        return None
    return train.compile.seconds / ((gain.value - 1) * _usual_step_seconds(train))


def _compile_gain(probe: ProbeResult, train: Trained) -> Interval | None:
    """Throughput of the compiled candidate over that of the arm that differs from it in nothing but compilation."""
    twin = probe.candidate.model_copy(update={"compile": "off"})
    arms = {"baseline": probe.baseline, "uncompiled": probe.others.get("uncompiled")}
    eager = next((role for role, arm in arms.items() if arm == twin), None)
    if eager is None or probe.candidate.compile == "off" or len(train.windows) < MIN_WINDOWS:
        return None
    return arm_ratio(probe.rounds, eager, "candidate")


def _warm_up_seconds(train: Trained) -> float:
    """Extra time of the first window of steps: compile, autotuning, cold caches. 0 where unknown."""
    if len(train.windows) < MIN_WINDOWS:
        return 0.0
    _, num_steps, seconds = train.windows[0]
    return max(0.0, seconds - num_steps * _usual_step_seconds(train))


def _usual_step_seconds(train: Trained) -> float:
    """Median over the windows after the first."""
    return statistics.median(seconds / num_steps for _, num_steps, seconds in train.windows[1:])
