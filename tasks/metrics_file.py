"""Metrics on their way from rank 0 to the flow: a file of lines in the rank's directory, which outlives both.

The rank appends without waiting, and the flow reads. So a rank needs no connection to MLflow, and metrics that were not
uploaded when a process died remain in the file.
"""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from paceline.tasks.errors import SupersededError

LoggedMetric = tuple[str, float, int, int]  # name, value, Unix time in milliseconds, step
FILE = "metrics.jsonl"
SYSTEM_METRIC_PREFIX = "system/"  # prefix of system metrics, whose samples are numbered from 0 in each attempt


class MetricsFile:
    """The rank's side."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._kept = b""
        """What the disk has not taken yet."""
        self._lock = threading.Lock()

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Append metrics of a step. If the disk is full, the next call retries."""
        now = int(time.time() * 1000)
        lines = [json.dumps([name, value, now, step]) for name, value in metrics.items()]
        with self._lock, suppress(OSError):  # curves are not worth a training
            self._kept += "".join(f"{line}\n" for line in lines).encode()
            while self._kept:
                self._kept = self._kept[os.write(self._file, self._kept) :]

    def log_durably(self, metrics: dict[str, float], step: int) -> None:
        """The same, and all lines so far seen to the disk, or to other hosts: for a thread that may wait."""
        self.log(metrics, step)
        with suppress(OSError):
            os.fdatasync(self._file)

    def close(self) -> None:
        """Append what is left, if the disk takes it now."""
        self.log_durably({}, 0)
        with suppress(OSError):  # some file systems report only now that they are full
            os.close(self._file)


class MetricsReader:
    """The flow's side: what all attempts at a training have written, the oldest first. The same files read the same."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._attempt = -1
        self._path: Path | None = None
        self._offset = 0
        self._first_sample = self._num_samples = 0

    def read(self, most: int) -> list[LoggedMetric]:
        """The next metrics whose lines are whole by now, `most` at a time; none if there are none."""
        while True:
            while lines := self._lines(most):
                if metrics := [metric for line in lines for metric in self._metrics(line)]:
                    return metrics
            if not self._turn():
                return []

    def _lines(self, most: int) -> list[bytes]:
        if self._path is None:
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            lines = [line for line in islice(file, most) if line.endswith(b"\n")]
        self._offset += sum(map(len, lines))
        return lines

    def _metrics(self, line: bytes) -> Iterator[LoggedMetric]:
        """The one of a line; none of a line that a disk has spoilt.

        Samples of a machine are counted on from the attempts before; training steps are what they are.
        """
        try:
            name, value, when, step = json.loads(line)
        except (ValueError, TypeError):
            return
        if name.startswith(SYSTEM_METRIC_PREFIX):
            step += self._first_sample
            self._num_samples = max(self._num_samples, step + 1)
        yield name, value, when, step

    def _turn(self) -> bool:
        """Go on with the next attempt's file; False if there is none."""
        paths = {attempt_number(path.parents[1]): path for path in self._directory.glob(f"attempt-*/rank-0/{FILE}")}
        later = {number: path for number, path in paths.items() if number > self._attempt}
        if not later:
            return False
        self._attempt = min(later)
        self._path, self._offset, self._first_sample = later[self._attempt], 0, self._num_samples
        return True


def attempts(directory: Path) -> list[int]:
    """Numbers of a training's attempts."""
    return sorted(attempt_number(path) for path in directory.glob("attempt-*"))


def require_newest(attempt: Path) -> None:
    """Raise SupersededError if a newer attempt than this directory's exists: another process trains the run.

    Its lock excludes that, unless it lies on a network file system that does not lock, or has lost the lock.
    """
    if (newest := max(attempts(attempt.parent), default=-1)) > attempt_number(attempt):
        raise SupersededError(
            f"{attempt.name} of run {attempt.parent.name} was superseded by attempt-{newest} of another process; "
            "mount PACELINE_HOME with locks, and check it with paceline doctor"
        )


def attempt_number(directory: Path) -> int:
    """Number of an attempt from its directory."""
    return int(directory.name.removeprefix("attempt-"))
