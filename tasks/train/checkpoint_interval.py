"""How far apart checkpoints are where the configuration leaves that open: by what one costs and how fast steps are.

Two bounds: checkpoints take at most `MAX_SHARE` of the time, and a loss costs at most `MAX_LOST_SECONDS` of work. Where
one checkpoint is so expensive that both cannot hold, the first bound does. Knows nothing of files, ranks or devices.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

from paceline.tasks.records import Choice

if TYPE_CHECKING:
    from paceline.tasks.model.batch import StepScheduleLike

MAX_SHARE = 0.02
"""Of the time, for checkpoints."""
MAX_LOST_SECONDS = 300.0
"""Of work, that a loss may cost."""
MIN_SECONDS = 30.0
"""Between two checkpoints, however cheap they are. A restart takes 10 s by itself (two ranks of digits on two busy CPU
cores, 2026-11-23), and a loss costs half of this on average: writing more often would save less than a restart takes.
"""
NUM_COSTS = 3
"""Newest checkpoints of whose costs the median counts: a disk may be slow for once."""


class CheckpointInterval:
    """When the next checkpoint is due. It is asked at few steps, and names the next of them each time.

    The pace of the steps is wall time over all that happens between checkpoints, such as validation: that is what a
    loss costs. It is trusted for as many steps as it was measured over, so one that changes is noticed.

    Args:
        course: of the training.
        log_steps: between log points, where the host has waited for the device already.
        step: at which training starts.
        now: reading of a clock, seconds.
    """

    def __init__(self, course: StepScheduleLike, log_steps: int, step: int, now: float) -> None:
        self._course = course
        self._log_steps = log_steps
        self._since = step
        self._since_time = now
        self._costs: list[float] = []
        self.seconds = MIN_SECONDS
        """Between two checkpoints."""
        self.choice: Choice | None = None
        """The interval in steps and its reason; None until the cost of a checkpoint is known."""

    def next_step(self, step: int, now: float) -> int:
        """At which step to ask again; the given one if a checkpoint is due."""
        seconds, num_steps = max(now - self._since_time, 1e-9), step - self._since
        if seconds >= self.seconds:
            return step
        pace = seconds / num_steps
        missing = math.ceil((self.seconds - seconds) / pace)
        if missing > num_steps:
            return self._put_off(step + num_steps, pace)
        due = step + missing
        return self._put_off(due, pace, self._course.epoch_end(due))

    def saved(self, step: int, cost: float, now: float) -> int:
        """Take note of a checkpoint; at which step to ask again.

        Args:
            step: after which it was written.
            cost: seconds that training waited for it.
            now: reading of the clock, after it.
        """
        pace = max(now - cost - self._since_time, 1e-9) / max(1, step - self._since)
        self._costs = [*self._costs, cost][-NUM_COSTS:]
        cost = statistics.median(self._costs)
        self.seconds = max(MIN_SECONDS, cost / MAX_SHARE)
        self._since, self._since_time = step, now
        num_steps = max(1, round(self.seconds / pace))
        self.choice = Choice(value=num_steps, reason=self._reason(cost, pace))
        return self._put_off(step + max(1, num_steps // 2), pace)

    @property
    def _longest(self) -> float:
        """Seconds for which a checkpoint may be put off, since the one before."""
        return max(self.seconds, min(2 * self.seconds, MAX_LOST_SECONDS))

    def _put_off(self, step: int, pace: float, *better: int) -> int:
        """The first of better steps that is soon enough; then the next log point, if that is."""
        latest = self._since + self._longest / pace
        log_point = min(math.ceil(step / self._log_steps) * self._log_steps, self._course.epoch_end(step))
        return next((found for found in (*better, log_point) if found <= latest), step)

    def _reason(self, cost: float, pace: float) -> str:
        share = cost / (self.seconds + cost)
        times = f"a checkpoint takes {_brief(cost)}, a step {_brief(pace)}"
        apart = f"{times}: {self.seconds:.0f} s apart, {share:.2%} of the time"
        lost = f"{apart}; up to {self._longest:.0f} s of work can be lost"
        if self.seconds <= MAX_LOST_SECONDS:
            return lost
        closer = f"checkpoints no more than {MAX_LOST_SECONDS:.0f} s apart would take more than {MAX_SHARE:.0%}"
        return f"{lost}, because {closer}"


def rule() -> Choice:
    """The choice while the cost is not known."""
    return Choice(
        value="by cost",
        reason=f"measured with the first checkpoint, after {MIN_SECONDS:.0f} s of training: at most {MAX_SHARE:.0%} of "
        f"the time, and within that at most {MAX_LOST_SECONDS:.0f} s of work lost",
    )


def _brief(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
