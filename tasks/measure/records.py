"""Measurements by a group of ranks without training, and their results."""

from paceline.tasks.records.execution import Arm
from paceline.tasks.records.measurement import ProbeResult
from paceline.tasks.records.record import Record


class Measurement(Record):
    """Measurement of a group of ranks in place of training."""

    arms: dict[str, Arm]
    """By role; `baseline` and `candidate` among them. An arm has one device or all of the group's. None: the layers are
    timed, as before a training (`AutotuneResult`)."""
    all_reduce_bytes: tuple[int, ...] = ()  # sizes of the messages whose all-reduce is timed; needs at least two ranks
    can_leave_out: bool = False  # arms other than baseline and candidate may be left out if they cannot be executed

    def is_optional(self, label: str | None) -> bool:
        """Whether the arm of a label may be left out."""
        needed = {arm.label for role, arm in self.arms.items() if role in ("baseline", "candidate")}
        return label not in needed and (self.can_leave_out or not self.arms)


class FurtherStarts(Record):
    """Probes of a training's two arms in further fresh processes, each short."""

    probes: tuple[ProbeResult, ...] = ()  # disturbed ones included
    seconds: float = 0.0  # wall time of these processes, failed ones included
    reason: str = ""  # why there are so many, or none

    @property
    def undisturbed(self) -> tuple[ProbeResult, ...]:
        """The probes that count."""
        return tuple(probe for probe in self.probes if not probe.validity.contaminated)


class AllReduceTime(Record):
    """One measured all-reduce."""

    num_bytes: int
    num_devices: int
    seconds: float  # median over repeats, as rank 0 sees it
    spread: float  # distance of the quartiles, seconds


class MeasureResult(Record):
    """Result of a measurement."""

    probe: ProbeResult
    all_reduces: tuple[AllReduceTime, ...]
    gradient_bytes: int  # all-reduced per step: 4 for each parameter, 2 where gradients are compressed
    host: str = ""  # name of rank 0's host
