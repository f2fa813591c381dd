"""A process that is to be a rank, started before there is anything to run: it imports what ranks need, and waits.

On its worker a `Standby` starts it and later gives it a spec; the process itself is this module as a program. From then
on it is a rank like any other, a child of the same worker, in the environment that a fresh one would have had. It ends
with its worker. Knows neither who asks for it nor what a rank does.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.tasks.host import die_with
from paceline.tasks.train.launch.heartbeat import VARIABLE as PULSE

PARENT = "PACELINE_SUPERVISOR"
"""Variable that holds the process id of the worker that a rank dies with."""
MAX_ORDER_BYTES = 65_536
NUM_DESCRIPTORS = 3


class Standby:
    """The worker's side."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                command,
                env=self.environment | {PARENT: str(os.getpid())},
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def begin(
        self, spec_path: Path, environment: Mapping[str, str], log: int, pulse: int, lease: int
    ) -> subprocess.Popen[bytes] | None:
        """Have it run a spec; None if it is gone, and somebody else must.

        Args:
            spec_path: of the rank's description.
            environment: what the rank's environment has beside the one given at the start.
            log: descriptor of the file that takes what it prints from now on.
            pulse: descriptor of the pipe for its signs of life.
            lease: descriptor of its device's lock, to be held as long as it lives.
        """
        order = {"spec": str(spec_path), "environment": dict(environment)}
        with self._orders:
            try:
                socket.send_fds(self._orders, [json.dumps(order).encode()], [log, pulse, lease])
            except OSError:
                return None
        return self._process


def take(ready: list[Standby], environment: Mapping[str, str]) -> Standby | None:
    """Take the one out of a list that has this environment, if there is one."""
    for standby in ready:
        if standby.environment == environment:
            ready.remove(standby)
            return standby
    return None


def standby_command(run: str) -> list[str]:
    """The command of a process that imports a module, and will call its `main` with a spec's path."""
    return [sys.executable, "-m", __name__, run]


# The process


def die_with_supervisor() -> None:
    """End with the worker that supervises this process; without one it is replayed by hand."""
    parent = os.environ.get(PARENT)
    if parent:
        die_with(int(parent))


def _ordered() -> str:
    """Wait for the order on stdin, and make this process what it says; the spec's path."""
    with socket.socket(fileno=os.dup(0)) as orders:
        text, descriptors, _, _ = socket.recv_fds(orders, MAX_ORDER_BYTES, NUM_DESCRIPTORS)
    if not text:
        os._exit(0)  # there will be none
    log, pulse, _ = descriptors
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, place in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, place)
    os.close(nothing)
    os.close(log)
    order = json.loads(text)
    os.environ.update(order["environment"])
    os.environ[PULSE] = str(pulse)
    return str(order["spec"])


def main(run: str) -> int:
    """Import the module, wait, and run it."""
    die_with_supervisor()
    gc.disable()  # until the rank begins: looking for garbage among what is imported takes a quarter of the time
    program = importlib.import_module(run)
    status: int = program.main(_ordered())
    return status


if __name__ == "__main__":
    os._exit(main(*sys.argv[1:]))  # at once, as a rank does
