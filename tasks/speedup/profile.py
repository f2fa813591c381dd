"""From a measurement to the profile of one device: step times by batch size, contention, and gains of single changes.

All is taken relative to the profiled execution, round by round, so that what slows the machine leaves it alone; one
absolute time, the median of the profiled execution, gives the scale.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from tasks.records import AllReduceTime, ProbeResult
from tasks.speedup.forecast import AllReduceSample, Link, ProfilePoint, Waiting
from tasks.speedup.links import all_reduce_seconds
from tasks.speedup.statistics import Estimate, arm_ratio
from tasks.speedup.study import Interval

MIN_EXCHANGE = 0.2
"""Least factor of an exchange: where it is lost in the noise of the step it still takes some of its time."""


def profile_of(probe: ProbeResult) -> tuple[ProfilePoint, ...]:
    """Step times of the arms on one device that differ from the baseline in their batch size alone."""
    base = probe.baseline
    per_sample = statistics.median(
        block.seconds_per_sample for blocks in probe.rounds for block in blocks if block.arm == "baseline"
    )
    base_size = probe.samples_per_step["baseline"]
    scale = per_sample * base_size
    points = [ProfilePoint(batch_size=base_size, seconds=Interval(value=scale, low=scale, high=scale))]
    for role, arm in ({"candidate": probe.candidate} | probe.others).items():
        if arm.model_copy(update={"batch_size": base.batch_size}) != base:
            continue
        size = probe.samples_per_step[role]
        ratio = arm_ratio(probe.rounds, role, "baseline")  # seconds per sample over the baseline's
        assert ratio is not None
        points.append(ProfilePoint(batch_size=size, seconds=_times(ratio, scale * size / base_size)))
    return tuple(sorted(points, key=lambda point: point.batch_size))


def contention_of(probe: ProbeResult) -> Interval:
    """Step time with all devices at work and no exchange, over that of one device alone at the same batch.

    Args:
        probe: With the arm `no_sync`, and one on a single device with the same batch.
    """
    several = probe.others["no_sync"]
    share = probe.samples_per_step["no_sync"] // several.num_devices
    arms = {"baseline": probe.baseline} | probe.others
    alone = next(role for role, arm in arms.items() if arm.num_devices == 1 and probe.samples_per_step[role] == share)
    ratio = arm_ratio(probe.rounds, "no_sync", alone)
    assert ratio is not None
    return _times(ratio, several.num_devices)  # a sample of several devices' arm is one of all of them


def waiting_of(probe: ProbeResult, all_reduces: Sequence[AllReduceTime]) -> tuple[Waiting, ...]:
    """What the devices lose by waiting for each other, at each batch size that was measured both ways.

    Args:
        probe: With arms of the variants `token_sync` and `no_sync` that are alike in everything else.
        all_reduces: The smallest of them stands for the exchange of a single number.
    """
    arms = {"candidate": probe.candidate} | probe.others
    token = min(all_reduces, key=lambda one: one.num_bytes).seconds
    found = []
    for role, arm in arms.items():
        twin = arm.model_copy(update={"variant": "no_sync"})
        free = next((other for other, its in arms.items() if its == twin), None)
        if arm.variant != "token_sync" or free is None:
            continue
        ratio = arm_ratio(probe.rounds, role, free)
        assert ratio is not None
        size = probe.samples_per_step[role] // arm.num_devices
        found.append(Waiting(ratio=_times(ratio, 1.0), batch_size=size, token_seconds=token))
    return tuple(found)


def exchange_of(probe: ProbeResult, waiting: Sequence[Waiting], link: Link, gradient_bytes: int) -> Interval:
    """How much longer half of the gradients take to exchange inside a step than the link says.

    Args:
        probe: With the arm `half_sync`, alike the candidate of variant `token_sync` in everything else.
        waiting: As found from the same probe.
        link: Between these devices.
        gradient_bytes: Of all gradients.
    """
    ratio = arm_ratio(probe.rounds, "half_sync", "candidate")
    assert ratio is not None
    step = probe.samples_per_step["candidate"] * statistics.median(
        block.seconds_per_sample for blocks in probe.rounds for block in blocks if block.arm == "candidate"
    )
    expected = all_reduce_seconds(link, probe.candidate.num_devices, gradient_bytes / 2)
    token = waiting[0].token_seconds
    value, low, high = (
        max(MIN_EXCHANGE, (step * ((ratio.value if end is None else end) - 1) + token) / expected)
        for end in (ratio.value, ratio.low, ratio.high)
    )
    return Interval(value=value, low=low, high=high)


def gains(probe: ProbeResult) -> dict[str, Interval]:
    """Throughput of each other arm over the baseline's, by the setting that makes it."""
    found = {}
    arms = {"candidate": probe.candidate} | probe.others
    for role, arm in arms.items():
        ratio = arm_ratio(probe.rounds, "baseline", role)
        assert ratio is not None
        found[role if role != "candidate" else _setting(probe, arm.model_dump())] = _times(ratio, 1.0)
    return found


def _setting(probe: ProbeResult, arm: dict[str, object]) -> str:
    """The one setting in which an arm differs from the baseline."""
    base = probe.baseline.model_dump()
    field = next(name for name, value in arm.items() if value != base[name])
    section = "recipe" if field == "batch_size" else "execution"
    return f"{section}.{field}={arm[field]}"


def link_samples(all_reduces: Sequence[AllReduceTime]) -> list[AllReduceSample]:
    """Measured all-reduces as the link's model takes them."""
    return [
        AllReduceSample(num_bytes=one.num_bytes, num_devices=one.num_devices, seconds=one.seconds)
        for one in all_reduces
    ]


def _times(ratio: Estimate, factor: float) -> Interval:
    return Interval(
        value=ratio.value * factor,
        low=None if ratio.low is None else ratio.low * factor,
        high=None if ratio.high is None else ratio.high * factor,
    )
