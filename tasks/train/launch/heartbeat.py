"""Heartbeat of a rank: once a second it sends its step to its supervisor, and at the end its error.

Through a pipe that the rank inherits, because disk or network may be what fails. A stopped process, or one that holds
the interpreter for ever, sends none.
"""

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
    """The rank's end of the pipe; sends until the process ends. Silent in a rank that is replayed by hand."""

    def __init__(self) -> None:
        self.count_steps: Callable[[], int | None] = lambda: None  # global step; None before training
        self._pipe = os.environ.get(VARIABLE)
        self._lock = threading.Lock()
        if self._pipe is not None:
            threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    def final_error(self, facts: dict[str, Any]) -> None:
        """Send why this rank ends."""
        with contextlib.suppress(BrokenPipeError):
            self._send(facts)

    def _beat(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # the supervisor is gone, and this process is about to end
            while True:
                self._send(self.count_steps())
                time.sleep(BEAT_SECONDS)

    def _send(self, message: Any) -> None:
        if self._pipe is None:
            return
        line = memoryview(json.dumps(message).encode() + b"\n")
        with self._lock:
            while line:
                line = line[os.write(int(self._pipe), line) :]


class HeartbeatReader:
    """The supervisor's end of the pipe."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        os.set_blocking(self.reading, False)
        self._unfinished_line = b""
        self.last_beat: float | None = None  # monotonic time; None before the first
        self.step: int | None = None
        self.final_error: dict[str, Any] | None = None  # facts of the rank's error

    def read(self) -> None:
        """Read the messages that have arrived."""
        with contextlib.suppress(BlockingIOError):
            while received := os.read(self.reading, 65536):
                *lines, self._unfinished_line = (self._unfinished_line + received).split(b"\n")
                for line in lines:
                    message: int | dict[str, Any] | None = json.loads(line)
                    self.last_beat = time.monotonic()
                    if isinstance(message, dict):
                        self.final_error = message
                    else:
                        self.step = message
