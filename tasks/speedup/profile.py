"""From a measurement to the profile of one device: step times by batch size, contention, and gains of single changes.

All is taken relative to the profiled execution, round by round, so that what slows the machine leaves it alone; one
absolute time, the median of the profiled execution, gives the scale.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from tasks.records import AllReduceTime, ProbeResult
from tasks.speedup.forecast import AllReduceSample, ProfilePoint
from tasks.speedup.statistics import Estimate, arm_ratio
from tasks.speedup.study import Interval


def profile_of(probe: ProbeResult) -> tuple[ProfilePoint, ...]:
    """Step times of the arms on one device that differ from the baseline in their batch size alone."""
    base = probe.baseline
    per_sample = statistics.median(
        block.seconds_per_sample for blocks in probe.rounds for block in blocks if block.arm == "baseline"
    )
    base_size = probe.samples_per_step["baseline"]
    scale = per_sample * base_size
    points = [ProfilePoint(batch_size=base_size, seconds=Interval(value=scale, low=scale, high=scale))]
    for role, arm in probe.others.items():
        if arm.model_copy(update={"batch_size": base.batch_size}) != base:
            continue
        size = probe.samples_per_step[role]
        ratio = arm_ratio(probe.rounds, role, "baseline")  # seconds per sample over the baseline's
        assert ratio is not None
        points.append(ProfilePoint(batch_size=size, seconds=_times(ratio, scale * size / base_size)))
    return tuple(sorted(points, key=lambda point: point.batch_size))


def contention_of(probe: ProbeResult) -> Interval:
    """Step time with all devices at work and no exchange, over that of one device alone at the same batch."""
    share = probe.samples_per_step["candidate"] // probe.candidate.num_devices
    roles = ["baseline", *probe.others]
    alone = next(role for role in roles if probe.samples_per_step[role] == share)
    ratio = arm_ratio(probe.rounds, "candidate", alone)
    assert ratio is not None
    return _times(ratio, probe.candidate.num_devices)  # a candidate's sample is one of all its devices


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
