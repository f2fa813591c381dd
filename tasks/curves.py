"""Metrics on their way from rank 0 to the flow: a file of lines in the rank's directory, which outlives both.

The rank appends and waits for nobody; the flow reads behind it. So a rank needs no way to MLflow, and what was not told
when a process died is still there. Knows nothing of what the metrics mean.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from tasks.records import LoggedMetric

FILE = "metrics.jsonl"
SAMPLES = "system/"
"""What the names of samples of a machine begin with, which are numbered from 0 in each attempt."""


class MetricsFile:
    """The rank's side.

    Args:
        path: of the file; made anew.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._kept = b""
        """What the disk has not taken yet."""
        self._lock = threading.Lock()

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Append metrics of a step. A disk that is full is asked again at the next ones."""
        now = int(time.time() * 1000)
        lines = [json.dumps([name, value, now, step]) for name, value in metrics.items()]
        with self._lock, suppress(OSError):  # curves are not worth a training
            self._kept += "".join(f"{line}\n" for line in lines).encode()
            while self._kept:
                self._kept = self._kept[os.write(self._file, self._kept) :]

    def close(self) -> None:
        """Append what is left, if the disk takes it now."""
        self.log({}, 0)
        os.close(self._file)


class MetricsReader:
    """The flow's side: what all attempts at a training have written, the oldest first. The same files read the same.

    Args:
        directory: of the training.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._attempt = -1
        self._path: Path | None = None
        self._offset = 0
        self._first_sample = self._num_samples = 0

    def read(self, most: int) -> list[LoggedMetric]:
        """The next lines that are whole by now, `most` at a time; none if there are none."""
        while not (found := self._next(most)):
            if not self._turn():
                break
        return found

    def _next(self, most: int) -> list[LoggedMetric]:
        if self._path is None:
            return []
        found: list[LoggedMetric] = []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in islice(file, most):
                if not line.endswith(b"\n"):
                    break
                found.append(self._placed(*json.loads(line)))
                self._offset += len(line)
        return found

    def _placed(self, name: str, value: float, when: int, step: int) -> LoggedMetric:
        """Samples of a machine are counted on from the attempts before; training steps are what they are."""
        if name.startswith(SAMPLES):
            step += self._first_sample
            self._num_samples = max(self._num_samples, step + 1)
        return name, value, when, step

    def _turn(self) -> bool:
        """Go on with the next attempt's file; False if there is none."""
        later = {number: path for number, path in _files(self._directory) if number > self._attempt}
        if not later:
            return False
        self._attempt = min(later)
        self._path, self._offset, self._first_sample = later[self._attempt], 0, self._num_samples
        return True


def has_metrics(directory: Path) -> bool:
    """Whether any attempt at a training has begun to write them."""
    return any(_files(directory))


def _files(directory: Path) -> Iterator[tuple[int, Path]]:
    """Number and file of each attempt that has one."""
    for path in directory.glob(f"attempt-*/rank-0/{FILE}"):
        yield int(path.parent.parent.name.removeprefix("attempt-")), path
