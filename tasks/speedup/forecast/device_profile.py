"""From a measurement to the profile of one device: step times by batch size, contention, and gains of single changes.

All is taken relative to the profiled execution, round by round, so that what slows the machine leaves it alone; one
absolute time, the median of the profiled execution, gives the scale.
"""

from collections.abc import Mapping, Sequence

from paceline.tasks.measure.paired_ratio import Interval, arm_ratio
from paceline.tasks.records.execution import FASTER_INPUT, Arm
from paceline.tasks.records.measurement import AllReduceTime, ProbeResult
from paceline.tasks.speedup.forecast.records import Advice, Interference, ProfilePoint


def profile_of(probe: ProbeResult) -> tuple[ProfilePoint, ...]:
    """Step times of the arms on one device that differ from the baseline in their batch size alone."""
    base, base_size = probe.baseline, probe.samples_per_step["baseline"]
    scale = probe.seconds_per_sample("baseline") * base_size
    points = [ProfilePoint(batch_size=base_size, seconds=Interval(value=scale, low=scale, high=scale))]
    for role, arm in ({"candidate": probe.candidate} | probe.others).items():
        if arm.model_copy(update={"batch_size": base.batch_size}) == base:
            size, ratio = probe.samples_per_step[role], _ratio(probe, role, "baseline")
            points.append(ProfilePoint(batch_size=size, seconds=ratio.times(scale * size / base_size)))
    return tuple(sorted(points, key=lambda point: point.batch_size))


def measure_interference(probe: ProbeResult, all_reduces: Sequence[AllReduceTime]) -> tuple[Interference, ...]:
    """Interference of two devices at each batch size measured in all four ways, the smallest first.

    The arms of the probe are alike but for the number of devices and, on several, the variant: `no_sync`, `token_sync`
    and `full`. The smallest of the all-reduces stands for the exchange of a single number.
    """
    token = min(all_reduces, key=lambda one: one.num_bytes).seconds
    seconds_per_sample = probe.seconds_per_sample("baseline")
    arms = {"baseline": probe.baseline, "candidate": probe.candidate} | probe.others
    interferences = []
    for full, arm in arms.items():
        if arm.variant != "full" or arm.num_devices == 1:
            continue
        alone = _role(arms, arm, num_devices=1)
        free, waiting = _role(arms, arm, variant="no_sync"), _role(arms, arm, variant="token_sync")
        interferences.append(
            Interference(
                batch_size=probe.samples_per_step[alone],
                # a sample of several devices' arm is one of all of them
                contention=_ratio(probe, free, alone).times(arm.num_devices),
                waiting=_ratio(probe, waiting, free),
                token_seconds=token,
                # Against the baseline, so that a forecast of two devices has the noise of one ratio, not of three.
                step_seconds=_ratio(probe, full, "baseline").times(seconds_per_sample * probe.samples_per_step[full]),
            )
        )
    return tuple(sorted(interferences, key=lambda one: one.batch_size))


def _role(arms: dict[str, Arm], arm: Arm, **changes: object) -> str:
    target = arm.model_copy(update=changes)
    return next(role for role, its in arms.items() if its == target)


def _ratio(probe: ProbeResult, role: str, before: str) -> Interval:
    """Seconds per sample of an arm over those of another."""
    ratio = arm_ratio(probe.rounds, role, before)
    assert ratio is not None
    return ratio


def gains(probe: ProbeResult) -> dict[str, Interval]:
    """Throughput of each other arm over the baseline's, by the setting that makes it."""
    base, arm = probe.baseline.model_dump(), probe.candidate.model_dump()
    field = next(name for name, value in arm.items() if value != base[name])  # the one that differs
    setting = f"{'recipe' if field == 'batch_size' else 'execution'}.{field}={arm[field]}"
    if field == "variant":
        setting = FASTER_INPUT
    return {
        setting if role == "candidate" else role: _ratio(probe, "baseline", role)
        for role in ("candidate", *probe.others)
    }


_WHY: dict[str, str] = {
    "recipe.batch_size": "a larger batch spreads what a step costs whatever its size; the recipe changes with it",
    "execution.precision": "reduced precision does the same arithmetic with fewer bits",
    "execution.compile": "compiling fuses operators; its first step takes seconds to minutes",
    "execution.memory_format": "the layout of images decides which convolution kernels are used",
    "execution.loading": "how batches reach the device",
    FASTER_INPUT: "the most that more loader threads or faster storage could give, measured on a batch that is there",
}


def rank_moves(measured: Mapping[str, Interval], left_out: Mapping[str, str]) -> tuple[Advice, ...]:
    """Rank significant gains first, the largest at the top; then unmeasured settings; then those that do not pay."""
    ranked = [
        _advice(setting, measured[setting]) for setting in sorted(measured, key=lambda name: -measured[name].value)
    ]
    paying = [one for one in ranked if (one.low or 0.0) > 1]
    unknown = [Advice(setting=name, ratio=None, low=None, high=None, reason=why) for name, why in left_out.items()]
    return (*paying, *unknown, *(one for one in ranked if one not in paying))


def _advice(setting: str, ratio: Interval) -> Advice:
    why = _WHY.get(setting.partition("=")[0], "a single change of the present execution")
    if ratio.low is None or ratio.high is None:
        verdict = "too few rounds for an interval"
    elif ratio.low > 1:
        verdict = "faster within this process (95 % CI above 1)"
    elif ratio.high < 1:
        verdict = "slower within this process (95 % CI below 1), leave it"
    else:
        verdict = "no measurable gain"
    return Advice(setting=setting, ratio=ratio.value, low=ratio.low, high=ratio.high, reason=f"{verdict}: {why}")
