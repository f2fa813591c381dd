"""Fork server: imports once what ranks need, and forks a rank for each order of a supervisor on this host.

Importing torch and Lightning takes most of the time until own Lightning code trains. This process does it for all ranks
of a local cluster, and for the process that imports the user's code, which is forked before any rank. The server itself
imports nothing of the user's, computes nothing and has no threads of Python, so that what it forks is as a fresh
process is. A rank's process belongs to the server, which reports its end to the supervisor. It kills the rank when the
supervisor is gone, and the kernel kills the rank when the server is.
"""

import gc
import importlib
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from paceline.tasks.records.record import Record
from paceline.tasks.train.launch.standby import NUM_DESCRIPTORS, PARENT, become_rank, die_with_supervisor

MAX_BYTES = 2**20  # of an order, with a rank's environment
ANSWER_SECONDS = 30.0  # for the imports that precede the first order
ORDER_SECONDS = 5.0
OF_DASK = ("DASK_", "__DASK_")
"""Prefixes of variables that nannies give to workers, and that mean nothing to a rank."""
ENDED = "ended "
"""Start of the line in place of an answer: the process that answers requests has ended, with this status."""


class Order(Record):
    """A rank to fork, in the environment that the server was started in."""

    spec: str
    environment: dict[str, str]
    variables: dict[str, str]  # that are known last


class ForkServer:
    """The starting process's side: `process` answers requests by its pipes, see `lightning.child`."""

    def __init__(self, environment: Mapping[str, str], run: str, answer: str, *before: str) -> None:
        """Start it: `main` of the module `run` is a rank, that of `answer` answers; modules `before` come first.

        Raises OSError: the directory for temporary files cannot hold a socket.
        """
        self._directory = tempfile.TemporaryDirectory(prefix="paceline-fork-")
        self.path = str(Path(self._directory.name) / "orders")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(self.path)
            listening.listen()
            self.process: subprocess.Popen[str] = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(listening.fileno()), run, answer, *before],
                env=dict(environment) | {PARENT: str(os.getpid())},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                pass_fds=[listening.fileno()],
                start_new_session=True,  # a terminal's Ctrl-C reaches the coordinator alone
            )

    def end(self) -> None:
        """End it, and what it has forked."""
        self.process.kill()
        with suppress(BrokenPipeError), self.process:  # of a request that nobody has read
            pass
        self._directory.cleanup()


class ForkedRank:
    """The supervisor's side of a rank that a server has forked, with what a supervisor uses of `subprocess.Popen`."""

    def __init__(self, server: socket.socket, pid: int) -> None:
        self._server, self.pid = server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The status of the rank as that of `Popen`; None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the status. Raises TimeoutExpired: it has not ended in these seconds."""
        if self.returncode is None:
            self._server.settimeout(timeout)
            try:
                status = self._server.recv(MAX_BYTES)
            except ConnectionError:
                status = b""
            except (BlockingIOError, TimeoutError):
                raise subprocess.TimeoutExpired("rank", timeout or 0.0) from None
            # Without a server the kernel has killed the rank. The number of a process is free again from here on.
            self.returncode = int(status) if status else -signal.SIGKILL
            self._server.close()
        return self.returncode


def fork_rank(
    path: str, spec: Path, environment: Mapping[str, str], variables: Mapping[str, str], descriptors: list[int]
) -> ForkedRank | None:
    """Have the server at `path` fork a rank in this environment; None if it is gone, or was started in another one.

    The descriptors are those of the log, the heartbeat and the lock of the device.
    """
    order = Order(spec=str(spec), environment=dict(environment), variables=dict(variables)).model_dump_json().encode()
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.settimeout(ANSWER_SECONDS)
    with suppress(OSError):
        server.connect(path)
        socket.send_fds(server, [order], descriptors)
        if pid := server.recv(MAX_BYTES):
            return ForkedRank(server, int(pid))
    server.close()
    return None


@dataclass(frozen=True)
class _Rank:
    """The server's side of a rank."""

    pid: int
    ended: int  # descriptor of the process
    supervisor: socket.socket


class _Server:
    """Waits for orders, for the ends of what was forked, and for the ends of supervisors."""

    def __init__(self, listening: socket.socket, environment: dict[str, str], run: str, answer: str) -> None:
        self._listening, self._ranks, self._events = listening, list[_Rank](), selectors.DefaultSelector()
        self._environment, self._pid = environment, os.getpid()
        self._watch(listening, self._take_order)
        answering = os.fork()
        if not answering:
            _leave(partial(self._answer, answer))
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        ended = os.pidfd_open(answering)
        self._watch(ended, partial(self._end_answers, answering, ended))
        self._program = importlib.import_module(run)

    def serve(self) -> NoReturn:
        """Serve until the process that has started this one kills it, or ends."""
        while True:
            for key, _ in self._events.select():
                key.data()

    def _watch(self, source: Any, act: Callable[[], None]) -> None:
        self._events.register(source, selectors.EVENT_READ, act)

    def _answer(self, module: str) -> int:
        self._forget()
        importlib.import_module(module).main()
        return 0

    def _end_answers(self, pid: int, ended: int) -> None:
        self._events.unregister(ended)
        os.close(ended)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with suppress(BrokenPipeError):  # nobody asks any more
            os.write(1, f"{ENDED}{status}\n".encode())

    def _take_order(self) -> None:
        supervisor, _ = self._listening.accept()
        supervisor.settimeout(ORDER_SECONDS)
        descriptors: list[int] = []
        pid = None
        # Without an order, or without memory for a process, the supervisor starts a program.
        with suppress(OSError, ValueError):
            text, descriptors, _, _ = socket.recv_fds(supervisor, MAX_BYTES, NUM_DESCRIPTORS)
            order = Order.model_validate_json(text)
            if _relevant(order.environment) == self._environment:
                pid = os.fork()
                if not pid:
                    _leave(partial(self._run, order, descriptors, supervisor))
        for descriptor in descriptors:
            os.close(descriptor)
        if pid is None:
            supervisor.close()
        else:
            self._watch_rank(pid, supervisor)

    def _watch_rank(self, pid: int, supervisor: socket.socket) -> None:
        with suppress(OSError):  # it has done so itself, and perhaps ended
            os.setpgid(pid, pid)
        rank = _Rank(pid, os.pidfd_open(pid), supervisor)
        self._ranks.append(rank)
        self._watch(rank.ended, partial(self._report_end, rank))
        self._watch(supervisor, partial(self._end_rank, rank))
        with suppress(OSError):  # the supervisor is gone
            supervisor.send(str(pid).encode())

    def _run(self, order: Order, descriptors: list[int], supervisor: socket.socket) -> int:
        os.setpgid(0, 0)  # one group to kill; the server does so too, and whoever comes second changes nothing
        supervisor.close()
        self._forget()
        log, heartbeat, _ = descriptors
        become_rank(order.environment | order.variables | {PARENT: str(self._pid)}, log, heartbeat)
        return int(self._program.main(order.spec))

    def _forget(self) -> None:
        """In a forked process: close what is the server's, and differ from the others as a fresh process does."""
        os.environ[PARENT] = str(self._pid)
        die_with_supervisor()
        self._events.close()
        self._listening.close()
        for rank in self._ranks:
            os.close(rank.ended)
            rank.supervisor.close()
        random.seed()
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()

    def _report_end(self, rank: _Rank) -> None:
        """Send the status. The process stays a zombie until the supervisor closes: its number must not be another's."""
        self._events.unregister(rank.ended)
        done = os.waitid(os.P_PIDFD, rank.ended, os.WEXITED | os.WNOWAIT)
        assert done is not None
        status = done.si_status if done.si_code == os.CLD_EXITED else -done.si_status
        with suppress(OSError):  # the supervisor is gone
            rank.supervisor.send(str(status).encode())

    def _end_rank(self, rank: _Rank) -> None:
        """The supervisor has read the status, or it is gone."""
        self._events.unregister(rank.supervisor)
        rank.supervisor.close()
        with suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)
        os.waitpid(rank.pid, 0)
        with suppress(KeyError):
            self._events.unregister(rank.ended)
        os.close(rank.ended)
        self._ranks.remove(rank)


def _relevant(environment: Mapping[str, str]) -> dict[str, str]:
    """What libraries read from an environment when they are loaded, and anything else that programs may read then."""
    return {name: value for name, value in environment.items() if not name.startswith((*OF_DASK, "PACELINE_"))}


def _leave(program: Callable[[], int]) -> NoReturn:
    """Run what a forked process is for, and end it; nothing of the server's goes on in it."""
    status = 1
    try:
        status = program()
    except BaseException:  # noqa: BLE001  into the log
        traceback.print_exc()
    finally:
        os._exit(status)


def main(descriptor: int, run: str, answer: str, *before: str) -> NoReturn:
    """Import the modules, fork the process that answers requests, and serve orders."""
    die_with_supervisor()
    environment = _relevant(os.environ)  # engines change it when they are imported
    gc.disable()  # until ranks start: searching the imported modules for garbage takes a quarter of the time
    for name in before:
        with suppress(Exception):  # what was forked imports it again, and reports what fails
            importlib.import_module(name)
    _Server(socket.socket(fileno=descriptor), environment, run, answer).serve()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
