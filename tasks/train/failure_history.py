"""Failures of earlier trainings that `PACELINE_HOME` has recorded, per device hour."""

from contextlib import suppress
from pathlib import Path

from paceline.tasks.metrics_file import attempts
from paceline.tasks.records.record import Record

PRIOR_HOURS = 24.0
"""Device hours with one failure that count in addition to the record. An assumption for sites without a record; an
expensive cluster does better (one failure in 50,000 GPU hours: "The Llama 3 Herd of Models", 2024, section 3.3.4).
"""
MAX_RUNS = 200  # newest runs that count: a site changes, and reading must stay quick


class FailureHistory(Record):
    """Failures of trainings, in device hours."""

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
    try:
        return path.stat().st_mtime
    except OSError:  # removed meanwhile
        return 0.0
