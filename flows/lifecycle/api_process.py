"""The process of Prefect's temporary API: a fork of a command, or a program.

A command that has imported Prefect, and nothing that a fork would harm, is forked: a third of the API's start is the
import of what both use.
"""

import gc
import os
import random
import select
import signal
import socket
import subprocess
import sys
import warnings
from contextlib import suppress
from functools import partial
from typing import Protocol

from paceline.tasks.host import die_with, has_one_thread, leave

AUTH = "PREFECT_SERVER_API_AUTH_STRING"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LISTENING = 3
"""Descriptor of the listening socket in a fork; those above it are closed."""


class Process(Protocol):
    """What is used of `subprocess.Popen`, and what a fork has too."""

    pid: int

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the status. Raises TimeoutExpired: it has not ended in these seconds."""

    def terminate(self) -> None:
        """Send SIGTERM."""

    def kill(self) -> None:
        """Send SIGKILL."""


def start(descriptor: int, auth: str) -> Process:
    """Start to serve the API on a listening socket, for clients with the user and password `auth`."""
    if can_fork():
        return _Fork(descriptor, auth)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, str(descriptor), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=2,  # stdout is for the outcome
        env=os.environ | {AUTH: auth},
        pass_fds=[descriptor],
        start_new_session=True,  # a terminal's Ctrl-C must leave it to the flow, which reports its last state
    )


def can_fork() -> bool:
    """Whether a fork of this process saves imports, and works: it has one thread, and no state of a GPU."""
    return "prefect" in sys.modules and "torch" not in sys.modules and has_one_thread()


class _Fork:
    """A fork of this process that serves the API."""

    def __init__(self, descriptor: int, auth: str) -> None:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            with suppress(ValueError, OSError):  # it is closed
                stream.flush()  # or the fork writes the text once more
        parent = os.getpid()
        self.pid = os.fork()
        if not self.pid:
            leave(partial(_serve_as_fork, descriptor, auth, parent))
        self._ends = os.pidfd_open(self.pid)
        self._status: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self._status is None:
            events = select.poll()
            events.register(self._ends, select.POLLIN)
            if not events.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired("API", timeout or 0)
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._ends)
        return self._status

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self._status is None:
            with suppress(ProcessLookupError):  # it has ended
                signal.pidfd_send_signal(self._ends, number)


def _serve_as_fork(descriptor: int, auth: str, parent: int) -> int:
    """Become like a program: a session, signals, descriptors, random numbers and settings of its own."""
    gc.freeze()  # what the command has opened is never closed here: its numbers become those of other files
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.dup2(descriptor, LISTENING)
    os.closerange(LISTENING + 1, os.sysconf("SC_OPEN_MAX"))
    random.seed()
    os.environ[AUTH] = auth
    from prefect.context import refresh_global_settings_context

    refresh_global_settings_context()
    main(LISTENING, parent)
    return 0


def main(descriptor: int, parent: int) -> None:
    """Serve the API on a listening socket until the process `parent` ends."""
    die_with(parent)
    gc.disable()  # a quarter of the time of all these imports
    with warnings.catch_warnings(action="ignore"):
        from prefect.server.api.server import create_app
    import uvicorn

    app = create_app(ephemeral=True, final=True)
    gc.freeze()
    gc.enable()
    uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on")).run([socket.socket(fileno=descriptor)])


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
