"""A rank's pulse: once a second it tells its supervisor that it lives, and how many steps it has done.

Through a pipe that the rank inherits: it needs no disk and no network, and its end says that the rank is gone. A
stopped process, or one that holds the interpreter for ever, has no pulse. Knows nothing of what the rank does.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

BEAT_SECONDS = 1.0
VARIABLE = "PACELINE_PULSE"


class Pulse:
    """The rank's side; beats until the process ends. Silent in a rank that is replayed by hand."""

    def __init__(self) -> None:
        self.count_steps: Callable[[], int | None] = lambda: None
        """Global step; None before training."""
        self._pipe = os.environ.get(VARIABLE)
        if self._pipe is not None:
            threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    def _beat(self) -> None:
        pipe = int(self._pipe or "")
        with contextlib.suppress(BrokenPipeError):  # the supervisor is gone, and so will be this process
            while True:
                step = self.count_steps()
                os.write(pipe, f"{-1 if step is None else step}\n".encode())
                time.sleep(BEAT_SECONDS)


class PulseReader:
    """The supervisor's side of the pipe."""

    def __init__(self) -> None:
        self._reading, self.writing = os.pipe()
        os.set_blocking(self._reading, False)
        self.last_beat: float | None = None
        """On the monotonic clock; None before the first."""
        self.step: int | None = None

    def read(self) -> None:
        """Take in what has come."""
        with contextlib.suppress(BlockingIOError):
            lines = os.read(self._reading, 4096).split()
            if lines:
                self.last_beat = time.monotonic()
                self.step = int(lines[-1]) if int(lines[-1]) >= 0 else None

    def close_writing(self) -> None:
        """The rank has its own; keep none, or its end would not be seen."""
        os.close(self.writing)

    def close(self) -> None:
        """Let go of the pipe."""
        os.close(self._reading)
