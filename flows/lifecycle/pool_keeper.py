"""Process that keeps a warm pool: it waits for a command, hands it to the pool, and returns the status of the run.

It needs Python alone, and takes no CPU while it waits. It pauses the pool as soon as that is ready: Prefect's API and
Dask's workers would take 3 % of a core. Command: `python -m paceline.flows.lifecycle.pool_keeper`, facts on stdin.
"""

import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from paceline.flows.lifecycle import pool
from paceline.tasks.host import process_fields, started_at

PROCESS = "paceline.flows.pool_process"
LOOK_SECONDS = 5.0  # between looks whether the pool is still of use
SETTLE_SECONDS, SETTLED_TICKS, MAX_SECONDS = 1.0, 30, 60.0
"""A pool has settled when it takes fewer 1/100 s of CPU time in a second, or a minute after it is ready. Imports take a
core; idle it took 3 to 16 % of one. The time of a process that has ended is missing: the difference may be below 0."""
ORDER_SECONDS = 1.0


class Command(NamedTuple):
    """A command that fits, and its connection."""

    connection: socket.socket
    order: bytes
    descriptors: list[int]  # stdin, stdout, stderr


class Pool:
    """The process of the next run and its descendants, which end with this process."""

    def __init__(self, facts: bytes) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:  # a process group of its own in this session: when this process is killed, the kernel ends it
            command = [sys.executable, "-P", "-m", PROCESS, str(os.getpid())]
            self.process = subprocess.Popen(command, stdin=theirs.fileno(), process_group=0)
        self._orders.send(facts)
        self.ended = os.pidfd_open(self.process.pid)
        self._files: list[list[str | int]] | None = None  # stamps of imported modules, once it is ready
        self.paused: list[int] = []  # its processes, if they are stopped
        self._ticks, self._looked, self._latest = 0, 0.0, math.inf

    def pause_when_settled(self) -> None:
        """Pause it if it is ready and settled, by the CPU time since the last call; at most one look in a second."""
        if self.paused or not self._is_ready() or time.monotonic() < self._looked + SETTLE_SECONDS:
            return
        self._latest = min(self._latest, time.monotonic() + MAX_SECONDS)
        before, self._ticks = self._ticks, sum(map(_ticks, _tree(self.process.pid)))
        self._looked = time.monotonic()
        if 0 <= self._ticks - before < SETTLED_TICKS or time.monotonic() > self._latest:
            os.kill(self.process.pid, signal.SIGSTOP)  # first, so that it starts no others
            self.paused = _tree(self.process.pid)
            self._signal(signal.SIGSTOP)
            if _has_lock(self.paused):  # others would wait for it
                self._signal(signal.SIGCONT)

    def _is_ready(self) -> bool:
        if self._files is None and _readable(self._orders.fileno(), seconds=0.0):
            self._files = json.loads(self._orders.recv(pool.MAX_BYTES) or b"null")
        return self._files is not None

    def take(self, command: Command) -> bool:
        """Hand a command to it once it is ready; False if it, or the command, has ended, or its code has changed."""
        try:
            command.connection.send(b"fits")
            while not self._is_ready():
                if _readable(self._orders.fileno(), self.ended, command.connection.fileno()) != {self._orders.fileno()}:
                    return False
            is_complete = all(started_at(pid) is not None for pid in self.paused)
            self._signal(signal.SIGCONT)
            is_same = all([*pool.stamp(Path(str(name)))] == [name, *facts] for name, *facts in self._files or ())
            if not (is_complete and is_same):
                return False
            socket.send_fds(self._orders, [command.order], command.descriptors)
        except OSError:  # a file, the process or the command is gone
            return False
        return True

    def end(self) -> None:
        """Kill it."""
        self._signal(signal.SIGKILL)
        self.process.kill()
        self.process.wait()

    def _signal(self, number: signal.Signals) -> None:
        for pid in reversed(self.paused):  # not reused: a paused process does not collect the statuses of its children
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        if number != signal.SIGSTOP:
            self.paused = []


def _readable(*descriptors: int, seconds: float | None = None) -> set[int]:
    """Those that can be read, or whose other end is gone; waits for the first."""
    return set(select.select(descriptors, [], [], seconds)[0])


def _ticks(pid: int) -> int:
    return sum(map(int, process_fields(pid)[11:13]))


def _has_lock(pids: list[int]) -> bool:
    """Whether a process has a lock of a transaction in a database of SQLite. Dask locks its own folders by `flock`."""
    with suppress(OSError):
        locks = [line.split() for line in Path("/proc/locks").read_text(encoding="utf-8").splitlines()]
        return not {str(pid) for pid in pids}.isdisjoint(
            words[4] for words in locks if words[1:4] == ["POSIX", "ADVISORY", "WRITE"]
        )
    return False


def _tree(root: int) -> list[int]:
    """A process and its descendants."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    parents = {pid: process_fields(pid)[1:2] for pid in pids}
    tree = [root]
    for pid in tree:
        tree += [child for child, parent in parents.items() if parent == [str(pid)]]
    return tree


def _wait(listening: socket.socket, made: Pool, terms: dict[str, Any], is_mine: Callable[[], bool]) -> Command | None:
    """Wait for a command that fits; None once nobody can use the pool.

    That is: its time or its session is over, its packages have changed, it has ended, or a command came that does not
    fit. A run that does not fit leaves a pool of its own.
    """
    give_up, leader = time.monotonic() + (terms["seconds"] or math.inf), terms["session"]
    shell = started_at(leader) if leader is not None else None  # another process may get its id later
    if leader is not None and shell is None:
        return None
    while time.monotonic() < give_up and (leader is None or started_at(leader) == shell) and is_mine():
        if pool.packages_time() != terms["packages"] or not Path(__file__).exists():  # an installation, or its removal
            return None
        made.pause_when_settled()
        seconds = LOOK_SECONDS if made.paused else SETTLE_SECONDS
        seconds = min(seconds, max(0.0, give_up - time.monotonic()))
        ready = _readable(listening.fileno(), made.ended, seconds=seconds)
        if made.ended in ready:
            return None
        if not ready:
            continue
        connection, order, descriptors = _accept(listening)
        if order == pool.END:
            made.end()  # before the connection closes, for which the other end waits
            return None
        if order:
            return Command(connection, order, descriptors) if json.loads(order)["digest"] == terms["digest"] else None
        connection.close()
    return None


def _accept(listening: socket.socket) -> tuple[socket.socket, bytes, list[int]]:
    connection, _ = listening.accept()
    connection.settimeout(ORDER_SECONDS)
    order, descriptors = b"", list[int]()
    with suppress(OSError):
        if pool.peer(connection)[1] == os.geteuid():
            order, descriptors, _, _ = socket.recv_fds(connection, pool.MAX_BYTES, pool.NUM_DESCRIPTORS)
    connection.settimeout(None)
    return connection, order, list(descriptors)


def _follow(command: Command, made: Pool) -> None:
    """Wait for the end of the run, and return its status; end the run if the command is gone."""
    with suppress(OSError):
        command.connection.send(str(made.process.pid).encode())
        for descriptor in command.descriptors:
            os.close(descriptor)  # readers of its output wait until all copies are closed
        if made.ended in _readable(made.ended, command.connection.fileno()):
            command.connection.send(str(made.process.wait()).encode())


def main() -> None:
    """Keep one pool until its run has ended, or until nobody can use it: see `_wait`. It replaces an earlier one."""
    terms, path = {"packages": pool.packages_time(), "digest": pool.digest()}, pool.socket_path()
    if not pool.make_socket_directory():
        return
    pool.end_pool()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        path.unlink(missing_ok=True)
        listening.bind(str(path))
        path.chmod(0o600)
        listening.listen()  # a command that comes before the pool is ready waits for it
        mine = path.stat()

        def is_mine() -> bool:
            return path.exists() and os.path.samestat(mine, path.stat())

        facts = sys.stdin.buffer.read()  # ends with the run that has started this process
        made = Pool(facts)
        try:
            command = _wait(listening, made, json.loads(facts) | terms, is_mine)
            if is_mine():
                path.unlink()  # before the run, which leaves the next
            listening.close()
            if command is not None and made.take(command):
                _follow(command, made)
        finally:
            made.end()


if __name__ == "__main__":
    main()
