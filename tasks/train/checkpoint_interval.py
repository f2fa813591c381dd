"""Automatic checkpoint interval, from the cost of a checkpoint and the seconds per step.

Two bounds: checkpoints take at most `MAX_SHARE` of the time, and a failure loses at most `MAX_LOST_SECONDS` of work. If
a checkpoint is too expensive for both, the first bound holds.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

from paceline.tasks.records.record import Choice

if TYPE_CHECKING:
    from paceline.tasks.data.loading.sampling import StepSchedule

MAX_SHARE = 0.02  # largest part of the time for checkpoints
MAX_LOST_SECONDS = 300.0  # most work that a failure may lose
MIN_SECONDS = 30.0
"""Least time between two checkpoints. A restart takes 10 s (two ranks of digits on two busy CPU cores, 2026-11-23), and
a failure loses half of this on average: writing more often would save less than a restart takes.
"""
NUM_COSTS = 3  # number of checkpoints of whose costs the median counts, because a disk may be slow once


class CheckpointInterval:
    """Decides when the next checkpoint is due; each answer is also the next step at which to ask.

    The pace is wall time per step, validation included, because that is what a failure loses. It is extrapolated over
    as many steps as it was measured, so that a change is noticed. At log points, every `log_steps`, the host has waited
    for the device already. `step` is where training starts, `now` a clock's reading in seconds.
    """

    def __init__(self, course: StepSchedule, log_steps: int, step: int, now: float) -> None:
        self._course, self._log_steps = course, log_steps
        self._since, self._since_time = step, now
        self._costs: list[float] = []
        self.seconds = MIN_SECONDS
        """Current interval."""
        self.choice: Choice | None = None
        """The interval in steps with its reason; None before the first checkpoint."""

    def next_step(self, step: int, now: float) -> int:
        """The step at which to ask again; `step` itself, at least one after the last checkpoint, if one is due now."""
        seconds, num_steps = max(now - self._since_time, 1e-9), step - self._since
        if seconds >= self.seconds:
            return step
        pace = seconds / num_steps
        missing = math.ceil((self.seconds - seconds) / pace)
        if missing > num_steps:
            return self._postpone(step + num_steps, pace)
        due = step + missing
        return self._postpone(due, pace, self._course.epoch_end(due))

    def record_checkpoint(self, step: int, cost: float, now: float) -> int:
        """Record a checkpoint that made the training wait `cost` seconds; return the step at which to ask again."""
        pace = max(now - cost - self._since_time, 1e-9) / max(1, step - self._since)
        self._costs = [*self._costs, cost][-NUM_COSTS:]
        cost = statistics.median(self._costs)
        self.seconds = max(MIN_SECONDS, cost / MAX_SHARE)
        self._since, self._since_time = step, now
        num_steps = max(1, round(self.seconds / pace))
        reason = (
            f"a checkpoint takes {_brief(cost)}, a step {_brief(pace)}: {self.seconds:.0f} s apart, "
            f"{cost / (self.seconds + cost):.2%} of the time; up to {self._longest:.0f} s of work can be lost"
        )
        if self.seconds > MAX_LOST_SECONDS:
            closer = f"checkpoints no more than {MAX_LOST_SECONDS:.0f} s apart would take more than {MAX_SHARE:.0%}"
            reason = f"{reason}, because {closer}"
        self.choice = Choice(value=num_steps, reason=reason)
        return self._postpone(step + max(1, num_steps // 2), pace)

    @property
    def _longest(self) -> float:
        """Longest time since the last checkpoint for which the next may be postponed."""
        return max(self.seconds, min(2 * self.seconds, MAX_LOST_SECONDS))

    def _postpone(self, step: int, pace: float, *better: int) -> int:
        """The first of the better steps that is soon enough, else the next log point if it is, else `step`."""
        latest = self._since + self._longest / pace
        log_point = min(math.ceil(step / self._log_steps) * self._log_steps, self._course.epoch_end(step))
        return next((candidate for candidate in (*better, log_point) if candidate <= latest), step)


def rule() -> Choice:
    """The choice before the first checkpoint."""
    return Choice(
        value="by cost",
        reason=f"measured with the first checkpoint, after {MIN_SECONDS:.0f} s of training: at most {MAX_SHARE:.0%} of "
        f"the time, and within that at most {MAX_LOST_SECONDS:.0f} s of work lost",
    )


def _brief(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
