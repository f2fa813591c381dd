"""Standby process: imports what ranks need before there is anything to run, and waits for a spec.

On the worker a `Standby` starts it and later sends it a spec; the process runs this module as a program. With the spec
it becomes a rank like any other, a child of the same worker, in the same environment. It ends with its worker.
"""

import gc
import importlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from paceline.tasks.host import die_with
from paceline.tasks.train.launch.heartbeat import VARIABLE as HEARTBEAT_VARIABLE

PARENT = "PACELINE_SUPERVISOR"
"""Variable with the process id of the worker, or of the fork server, that a rank ends with."""
MAX_ORDER_BYTES = 65_536
NUM_DESCRIPTORS = 3


class Standby:
    """The worker's end of the socket to a standby process.

    It imports the module `run`, and calls its `main` with the path of the spec it receives. Modules `before` are
    imported first, and their `start_early` is called where they have one.
    """

    def __init__(self, environment: Mapping[str, str], run: str, *before: str) -> None:
        self.environment = dict(environment)
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, run, *before],
                env=self.environment | {PARENT: str(os.getpid())},
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def start(
        self, spec_path: Path, environment: Mapping[str, str], log: int, heartbeat: int, device_lock: int
    ) -> subprocess.Popen[bytes] | None:
        """Let the process run a spec; None if the process is gone."""
        order = {"spec": str(spec_path), "environment": dict(environment)}
        with self._orders, suppress(OSError):
            socket.send_fds(self._orders, [json.dumps(order).encode()], [log, heartbeat, device_lock])
            return self._process
        return None


def take(ready: list[Standby], environment: Mapping[str, str]) -> Standby | None:
    """Remove a standby with this environment from the list; None without one."""
    standby = next((each for each in ready if each.environment == environment), None)
    if standby is not None:
        ready.remove(standby)
    return standby


def die_with_supervisor() -> None:
    """End with the worker or the fork server that has started this process; there is none in a replay by hand."""
    parent = os.environ.get(PARENT)
    if parent:
        die_with(int(parent))


def _receive_order() -> str:
    """Wait for the order on stdin, apply its environment and descriptors, and return the spec's path."""
    with socket.socket(fileno=os.dup(0)) as orders:
        text, descriptors, _, _ = socket.recv_fds(orders, MAX_ORDER_BYTES, NUM_DESCRIPTORS)
    if not text:
        os._exit(0)  # the worker has closed the socket
    log, heartbeat, _ = descriptors
    order = json.loads(text)
    become_rank(order["environment"], log, heartbeat)
    return str(order["spec"])


def become_rank(variables: Mapping[str, str], log: int, heartbeat: int) -> None:
    """Give this process the variables, the log and the heartbeat of a rank, and no input."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, place in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, place)
    os.close(nothing)
    os.close(log)
    os.environ.update(variables)
    os.environ[HEARTBEAT_VARIABLE] = str(heartbeat)


def main(run: str, *before: str) -> int:
    """Import the module, wait for a spec, and run it."""
    die_with_supervisor()
    gc.disable()  # until the rank starts: searching the imported modules for garbage takes a quarter of the time
    for name in before:
        with suppress(Exception):  # the rank imports it again, and reports what fails
            module = importlib.import_module(name)
            if hasattr(module, "start_early"):
                module.start_early()
    program = importlib.import_module(run)
    return int(program.main(_receive_order()))


if __name__ == "__main__":
    os._exit(main(*sys.argv[1:]))  # at once, as a rank does
