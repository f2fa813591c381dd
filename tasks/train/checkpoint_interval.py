"""Automatic checkpoint interval, from the cost of a checkpoint, earlier failures and the seconds per step.

The interval is the one that loses the least time: sqrt(2 x cost x time between failures) (J. W. Young, "A first order
approximation to the optimum checkpoint interval", 1974; J. T. Daly, "A higher order estimate of the optimum checkpoint
interval for restart dumps", 2006). Two bounds hold: checkpoints take at most `MAX_SHARE` of the time, and a failure
loses at most `MAX_LOST_SECONDS` of work. If a checkpoint is too expensive for both, the first bound holds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from paceline.tasks.metrics_file import attempts
from paceline.tasks.records.record import Choice, Record

MAX_SHARE = 0.02  # largest part of the time for checkpoints
MAX_LOST_SECONDS = 300.0  # most work that a failure may lose
MIN_SECONDS = 30.0
"""Least time between two checkpoints, and time before the first. A restart takes 10 s (two ranks of digits on two busy
CPU cores, 2026-11-23), and a failure loses half of this on average: writing more often would save less than a restart
takes.
"""
QUESTION_SECONDS = 30.0  # longest time between two questions: steps may become slower than their pace
NUM_COSTS = 3  # number of checkpoints of whose costs the median counts, because a disk may be slow once
PRIOR_HOURS = 24.0
"""Device hours with one failure that count in addition to the record. An assumption for sites without a record; an
expensive cluster does better (one failure in 50,000 GPU hours: "The Llama 3 Herd of Models", 2024, section 3.3.4).
"""
MAX_RUNS = 200  # newest runs that count: a site changes, and reading must stay quick


class CheckpointInterval:
    """Decides when the next checkpoint is due; each answer is also the next step at which to ask.

    The pace is wall time per step, validation included, because that is what a failure loses. It is extrapolated over
    as many steps as it was measured, so that a change is noticed. At log points, every `log_steps`, the host has waited
    for the device already. `epoch_end` gives the first step from a step on that ends an epoch. `step` is where training
    starts, `now` a clock's reading in seconds. The failures are read with the first checkpoint, so that a
    short training does not wait for them.
    """

    def __init__(
        self,
        epoch_end: Callable[[int], int],
        log_steps: int,
        step: int,
        now: float,
        read_failures: Callable[[], FailureHistory],
        num_devices: int,
    ) -> None:
        self._epoch_end, self._log_steps = epoch_end, log_steps
        self._since, self._since_time, self._started = step, now, now
        self._read_failures, self._num_devices = cache(read_failures), num_devices
        self._costs: list[float] = []
        self._spent = 0.0
        self._longest = 2 * MIN_SECONDS  # longest time since the last checkpoint for which the next may be postponed
        self.seconds = MIN_SECONDS  # current interval
        self.choice: Choice | None = None  # the interval in steps with its reason; None before the first checkpoint

    def next_step(self, step: int, now: float) -> int:
        """The step at which to ask again; `step` itself, at least one after the last checkpoint, if one is due now."""
        seconds, num_steps = max(now - self._since_time, 1e-9), step - self._since
        if seconds >= self.seconds:
            return step
        pace = seconds / num_steps
        missing = math.ceil((self.seconds - seconds) / pace)
        longest = min(num_steps, max(1, int(QUESTION_SECONDS / pace)))
        if missing > longest:
            return self._postpone(step + longest, pace)
        due = step + missing
        return self._postpone(due, pace, self._epoch_end(due))

    def record_checkpoint(self, step: int, cost: float, now: float, write_seconds: float = 0.0) -> int:
        """Record a checkpoint that made the training wait `cost` seconds; return the step at which to ask again.

        `write_seconds` is the time after that until such a checkpoint is on the disk.
        """
        pace = max(now - cost - self._since_time, 1e-9) / max(1, step - self._since)
        self._costs, self._spent = [*self._costs, cost][-NUM_COSTS:], self._spent + cost
        cost = statistics.median(self._costs)
        failures = self._read_failures()
        between = failures.hours_per_failure * 3600 / self._num_devices
        young = math.sqrt(2 * cost * between)
        longest = MAX_LOST_SECONDS - cost - write_seconds
        most = longest - QUESTION_SECONDS
        overdue = (self._spent + cost) / MAX_SHARE - (now - self._started)  # also for an expensive first checkpoint
        share = max(cost / MAX_SHARE, min(overdue, most))
        self.seconds = max(min(max(young, MIN_SECONDS), most), share)
        self._longest = max(self.seconds, min(2 * self.seconds, longest))
        self._since, self._since_time = step, now
        num_steps = max(1, round(self.seconds / pace))
        lost = max(self._longest, pace)
        rule = f"Young's interval is {_brief(young)}"
        if self.seconds != young:
            bounds = {MIN_SECONDS: "a restart takes as long", most: f"up to {MAX_LOST_SECONDS:.0f} s may be lost"}
            rule = f"{rule}, but {bounds.get(self.seconds, f'checkpoints may take {MAX_SHARE:.0%}')}"
        reason = (
            f"a checkpoint takes {_brief(cost)}, a step {_brief(pace)}; {failures.reason}; {rule}: "
            f"{self.seconds:.0f} s apart, {cost / (self.seconds + cost):.2%} of the time; "
            f"up to {lost + cost + write_seconds:.0f} s of work can be lost"
        )
        if lost > longest:
            closer = f"checkpoints no more than {MAX_LOST_SECONDS:.0f} s apart would take more than {MAX_SHARE:.0%}"
            reason = f"{reason}, because {closer if self.seconds == share else 'a step takes that long'}"
        self.choice = Choice(value=num_steps, reason=reason)
        return self._postpone(step + max(1, min(num_steps // 2, int(QUESTION_SECONDS / pace))), pace)

    def _postpone(self, step: int, pace: float, *better: int) -> int:
        """The first of the better steps that is soon enough, else the next log point if it is, else `step`."""
        latest = self._since + self._longest / pace
        log_point = min(math.ceil(step / self._log_steps) * self._log_steps, self._epoch_end(step))
        return next((candidate for candidate in (*better, log_point) if candidate <= latest), step)


def rule() -> Choice:
    """The choice before the first checkpoint."""
    return Choice(
        value="by cost",
        reason=f"measured with the first checkpoint, after {MIN_SECONDS:.0f} s of training: Young's interval, at most "
        f"{MAX_SHARE:.0%} of the time, and within that at most {MAX_LOST_SECONDS:.0f} s of work lost",
    )


def _brief(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


class FailureHistory(Record):
    """Failures of earlier trainings that `PACELINE_HOME` has recorded, per device hour."""

    num_failures: int = 0
    device_hours: float = 0.0

    @property
    def hours_per_failure(self) -> float:
        """Device hours between two failures: the mean of a gamma prior of one failure after the record."""
        return (self.device_hours + PRIOR_HOURS) / (self.num_failures + 1)

    @property
    def reason(self) -> str:
        """The record in words."""
        recorded = f"{self.num_failures} in {self.device_hours:.1f} recorded"
        return f"one failure in {self.hours_per_failure:.1f} device hours ({recorded}, 1 in {PRIOR_HOURS:.0f} assumed)"


def read_failures(home: Path) -> FailureHistory:
    """Count the failures of the newest trainings.

    An attempt that trained counts as a failure if a later attempt had to continue its training, whatever the cause.
    The directories of a run's attempts show this even when the flow was killed.
    """
    num_failures, seconds = 0, 0.0
    for run in sorted((home / "runs").glob("*"), key=_changed_at)[-MAX_RUNS:]:
        num_trained = 0
        for number in attempts(run):
            first = run / f"attempt-{number}" / "rank-0"
            with suppress(OSError):  # a measurement has no progress; a clean-up may have removed the attempt meanwhile
                trained = (first / "progress.json").stat().st_mtime - (first / "spec.json").stat().st_mtime
                seconds += max(0.0, trained) * len(list(first.parent.glob("rank-*")))
                num_trained += 1
        num_failures += max(0, num_trained - 1)
    return FailureHistory(num_failures=num_failures, device_hours=seconds / 3600)


def _changed_at(path: Path) -> float:
    with suppress(OSError):  # removed meanwhile
        return path.stat().st_mtime
    return 0.0
