"""A rank's pulse: once a second it tells its supervisor that it lives, and how many steps it has done.

Through a pipe that the rank inherits: it needs no disk and no network, either of which may be what fails, so a rank's
last words go the same way. A stopped process, or one that holds the interpreter for ever, has no pulse. Knows nothing
of what the rank does.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

BEAT_SECONDS = 1.0
VARIABLE = "PACELINE_PULSE"


class Heartbeat:
    """The rank's side; beats until the process ends. Silent in a rank that is replayed by hand."""

    def __init__(self) -> None:
        self.count_steps: Callable[[], int | None] = lambda: None
        """Global step; None before training."""
        self._pipe = os.environ.get(VARIABLE)
        self._lock = threading.Lock()
        if self._pipe is not None:
            threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    def final_error(self, facts: dict[str, Any]) -> None:
        """Say why this rank ends."""
        with contextlib.suppress(BrokenPipeError):
            self._say(facts)

    def _beat(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # the supervisor is gone, and so will be this process
            while True:
                self._say(self.count_steps())
                time.sleep(BEAT_SECONDS)

    def _say(self, what: Any) -> None:
        if self._pipe is None:
            return
        line = memoryview(json.dumps(what).encode() + b"\n")
        with self._lock:
            while line:
                line = line[os.write(int(self._pipe), line) :]


class HeartbeatReader:
    """The supervisor's side of the pipe."""

    def __init__(self) -> None:
        self._reading, self.writing = os.pipe()
        os.set_blocking(self._reading, False)
        self._rest = b""
        self.last_beat: float | None = None
        """On the monotonic clock; None before the first."""
        self.step: int | None = None
        self.final_error: dict[str, Any] | None = None
        """Why the rank ended, if it told."""

    def read(self) -> None:
        """Take in what has come."""
        with contextlib.suppress(BlockingIOError):
            while come := os.read(self._reading, 65536):
                *lines, self._rest = (self._rest + come).split(b"\n")
                for line in lines:
                    self._take(json.loads(line))

    def _take(self, said: int | dict[str, Any] | None) -> None:
        self.last_beat = time.monotonic()
        if isinstance(said, dict):
            self.final_error = said
        else:
            self.step = said

    def close_writing(self) -> None:
        """The rank has its own; keep none, or its end would not be seen."""
        os.close(self.writing)

    def close(self) -> None:
        """Let go of the pipe."""
        os.close(self._reading)
