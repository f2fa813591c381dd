"""Throughput of trials side by side: a paired measurement of their steps on the sweep's devices.

All arms are steps of the same recipe, in blocks that alternate (`paceline.tasks.measure.probe`): one model alone on one
device; one on each device, side by side; one on all devices, which share its batches; and on CPUs one on a device
of all cores.
Pure: nothing is run here.
"""

from typing import Literal

from paceline.tasks.measure.paired_ratio import Interval, arm_ratio
from paceline.tasks.measure.records import Measurement
from paceline.tasks.records.execution import Plan
from paceline.tasks.records.measurement import ProbeResult
from paceline.tasks.records.record import Record
from paceline.tasks.speedup.study.pairs import as_interval
from paceline.tasks.train.plan import arm_of

Layout = Literal["one model per device", "one model on all devices", "no certain difference"]
ALONE, BESIDE, TOGETHER, WHOLE = "baseline", "candidate", "together", "whole"
"""Arms by their roles in the probe: see above."""


class Colocation(Record):
    """Measured throughput of trials side by side."""

    num_devices: int
    over_alone: Interval
    """Samples per second of all models side by side, over those of one alone on one such device."""
    over_together: Interval
    """Over those of one model on all devices, of the same batch."""
    over_whole: Interval | None
    """Over those of one model on a device of all cores; None where a device is a GPU."""
    num_rounds: int
    seconds: float
    contaminated: bool | None
    """Others used the machine meanwhile; None where nothing could be observed."""
    reasons: tuple[str, ...] = ()
    """What was seen of them."""

    @property
    def over_best(self) -> Interval:
        """Over the faster of the ways to have one model on all devices."""
        ways = [way for way in (self.over_together, self.over_whole) if way is not None]
        return min(ways, key=lambda way: way.value)

    @property
    def layout(self) -> Layout:
        """The layout with more samples per second over all trials."""
        ratio = self.over_best
        if ratio.low is not None and ratio.low > 1:
            return "one model per device"
        if ratio.high is not None and ratio.high < 1:
            return "one model on all devices"
        return "no certain difference"


def colocation_of(plan: Plan, batch_size: int, num_cores: int) -> Measurement:
    """The measurement for a sweep."""
    side_by_side = arm_of(plan).model_copy(update={"batch_size": batch_size, "variant": "no_sync"})
    alone = side_by_side.model_copy(update={"num_devices": 1, "variant": "full"})
    share = {"batch_size": max(1, batch_size // plan.world_size), "variant": "full"}
    arms = {ALONE: alone, BESIDE: side_by_side, TOGETHER: side_by_side.model_copy(update=share)}
    if plan.accelerator == "cpu" and plan.num_threads < num_cores:
        arms[WHOLE] = alone.model_copy(update={"num_threads": num_cores})
    return Measurement(arms=arms)


def judge_colocation(probe: ProbeResult) -> Colocation | None:
    """Judge the measurement; None if it was too short."""
    roles = (ALONE, TOGETHER, WHOLE)
    alone, together, all_cores = (as_interval(arm_ratio(probe.rounds, role, BESIDE)) for role in roles)
    if alone is None or together is None:
        return None
    return Colocation(
        num_devices=probe.candidate.num_devices,
        over_alone=alone,
        over_together=together,
        over_whole=all_cores,
        num_rounds=len(probe.rounds),
        seconds=probe.seconds,
        contaminated=probe.validity.contaminated,
        reasons=probe.validity.reasons,
    )
