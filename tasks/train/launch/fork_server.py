"""Fork server: imports once what ranks need, and forks a rank for each order of a supervisor on this host.

Importing torch and Lightning takes most of the time until a training starts. This process does it for the first ranks
of a local cluster, while the command and the cluster start. With own Lightning code it does so for the process that
imports the user's code too, which is forked before any rank. The server
itself imports nothing of the user's and computes nothing. It forks ranks only while it has one thread, so that they are
like fresh processes. It is their parent, and reports their ends to the supervisors. If the connection of a supervisor
closes, the server kills the group of its rank. If the server ends, the kernel kills the ranks. See decision 0040.
"""

import gc
import importlib
import json
import os
import random
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from paceline.tasks.host import peer_user
from paceline.tasks.records.record import Record
from paceline.tasks.train.launch.standby import NUM_DESCRIPTORS, PARENT, become_rank, die_with_supervisor

MAX_BYTES = 2**20  # of an order, with a rank's environment
FORK_SECONDS = 30.0  # for an answer to an order: imports may precede it
ORDER_SECONDS = 5.0
END_SECONDS = 60.0  # for the status of a rank that was killed
DASK_PREFIXES = ("DASK_", "__DASK_")
"""Prefixes of variables that ranks do not use."""
ENDED = "ended "
"""Start of the line in place of an answer: the process that answers requests has ended, with this status."""
BLOCKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals for all processes of a group or a service. What was forked handles them; the server ends with the flow."""


class Order(Record):
    """A rank to fork."""

    spec: str
    environment: dict[str, str]  # equal to the server's, or the order is refused
    variables: dict[str, str]  # set after the comparison


class ForkServer:
    """The starting process's side: `process` answers requests by its pipes, see `lightning.child`."""

    def __init__(self, environment: Mapping[str, str], rank_module: str, answer_module: str, *before: str) -> None:
        """Start it in the environment of a rank; the process that answers has that of this process.

        Args:
            environment: of a rank.
            rank_module: its `main` is a rank's.
            answer_module: its `main` answers requests; empty if there are none.
            before: modules that are imported before anything is forked.
        """
        self.address = f"paceline-{secrets.token_hex(16)}"
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening,
            os.fdopen(os.memfd_create("environment"), "w") as variables,
        ):
            listening.bind(f"\0{self.address}")  # no file that a killed flow would leave
            listening.listen()
            json.dump(dict(os.environ), variables)
            variables.flush()
            descriptors = [listening.fileno(), variables.fileno()]
            self.process: subprocess.Popen[str] = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, *map(str, descriptors), rank_module, answer_module, *before],
                env=dict(environment) | {PARENT: str(os.getpid())},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                pass_fds=descriptors,
                start_new_session=True,  # a terminal's Ctrl-C reaches the coordinator alone
            )

    def end(self) -> None:
        """End it, the process that answers, what that has started, and the ranks."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(BrokenPipeError), self.process:  # of a request that nobody has read
            pass


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
        """Wait for the end, and return the status. Raises TimeoutExpired: it has not ended in these seconds.

        Without a limit, which a supervisor uses for a killed rank only, a silent server counts as a killed one.
        """
        if self.returncode is None:
            self._server.settimeout(END_SECONDS if timeout is None else timeout)
            status = b""
            try:
                status = self._server.recv(MAX_BYTES)
            except (BlockingIOError, TimeoutError):
                if timeout is not None:
                    raise subprocess.TimeoutExpired("rank", timeout) from None
            except ConnectionError:  # the server is gone, and the kernel has killed the rank
                pass
            self.returncode = int(status) if status else -signal.SIGKILL
            self._server.close()
        return self.returncode


def fork_rank(
    address: str, spec: Path, environment: Mapping[str, str], variables: Mapping[str, str], descriptors: list[int]
) -> ForkedRank | None:
    """Have the server at an address fork a rank; None if it is gone, or was started in another environment.

    The descriptors are those of the log, the heartbeat and the lock of the device.
    """
    order = {"spec": str(spec), "environment": dict(environment), "variables": dict(variables)}
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.settimeout(FORK_SECONDS)
    with suppress(OSError):
        server.connect(f"\0{address}")
        if peer_user(server) == os.geteuid():
            socket.send_fds(server, [json.dumps(order).encode()], descriptors)
            if pid := server.recv(MAX_BYTES):
                return ForkedRank(server, int(pid))
    server.close()
    return None


@dataclass(frozen=True)
class _Rank:
    """The server's side of a rank."""

    pid: int
    pidfd: int
    supervisor: socket.socket


class _Server:
    """Waits for orders, for the ends of what was forked, and for the ends of supervisors."""

    def __init__(self, listening: socket.socket, started_with: dict[str, str], requests: int, answers: int) -> None:
        self._listening, self._started_with, self._pid = listening, started_with, os.getpid()
        self._requests, self._answers = requests, answers
        self._ranks: list[_Rank] = []
        self._events = selectors.DefaultSelector()
        self._watch(listening, self._take_order)
        self._rank_module: Any = None  # without one, all orders are refused

    def answer(self, module: str, environment: dict[str, str]) -> None:
        """Fork the process that answers requests, in an environment of its own."""
        pid = os.fork()
        if not pid:
            _leave(partial(self._answer, module, environment))
        os.close(self._requests)
        pidfd = os.pidfd_open(pid)
        self._watch(pidfd, partial(self._end_answers, pid, pidfd))

    def serve(self, rank_module: str) -> NoReturn:
        """Serve orders until the process that has started this one kills it, or ends."""
        with suppress(Exception):  # supervisors start programs then, which report it
            self._rank_module = importlib.import_module(rank_module)
        while True:
            for key, _ in self._events.select():
                key.data()

    def _watch(self, source: Any, act: Callable[[], None]) -> None:
        self._events.register(source, selectors.EVENT_READ, act)

    def _answer(self, module: str, environment: dict[str, str]) -> int:
        self._detach()
        for descriptor, place in ((self._requests, 0), (self._answers, 1)):
            os.dup2(descriptor, place)
            os.close(descriptor)
        of_imports = {name: value for name, value in os.environ.items() if self._started_with.get(name) != value}
        os.environ.clear()
        os.environ.update(environment | of_imports)
        sys.argv = [module]
        importlib.import_module(module).main()
        return 0

    def _end_answers(self, pid: int, pidfd: int) -> None:
        self._events.unregister(pidfd)
        os.close(pidfd)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with suppress(BrokenPipeError):  # nobody asks any more
            os.write(self._answers, f"{ENDED}{status}\n".encode())

    def _take_order(self) -> None:
        supervisor, _ = self._listening.accept()
        if peer_user(supervisor) != os.geteuid():
            supervisor.close()
            return
        supervisor.settimeout(ORDER_SECONDS)
        descriptors: list[int] = []
        pid = None
        # Without an order, or without memory for a process, the supervisor starts a program.
        with suppress(OSError, ValueError):
            text, descriptors, _, _ = socket.recv_fds(supervisor, MAX_BYTES, NUM_DESCRIPTORS)
            order = Order.model_validate(json.loads(text))
            if len(descriptors) == NUM_DESCRIPTORS and self._can_fork(order) and not _has_closed(supervisor):
                pid = os.fork()
                if not pid:
                    _leave(partial(self._run, order, descriptors, supervisor))
        for descriptor in descriptors:
            os.close(descriptor)
        if pid is None:
            supervisor.close()
        else:
            self._watch_rank(pid, supervisor)

    def _can_fork(self, order: Order) -> bool:
        num_threads = len(list(Path("/proc/self/task").iterdir()))  # a fork has the calling one alone
        is_equal = comparable(order.environment) == comparable(self._started_with)
        return self._rank_module is not None and num_threads == 1 and is_equal

    def _watch_rank(self, pid: int, supervisor: socket.socket) -> None:
        with suppress(OSError):  # it has done so itself, and perhaps ended
            os.setpgid(pid, pid)
        rank = _Rank(pid, os.pidfd_open(pid), supervisor)
        self._ranks.append(rank)
        self._watch(rank.pidfd, partial(self._report_end, rank))
        self._watch(supervisor, partial(self._end_rank, rank))
        with suppress(OSError):  # the supervisor is gone
            supervisor.send(str(pid).encode())

    def _run(self, order: Order, descriptors: list[int], supervisor: socket.socket) -> int:
        os.setpgid(0, 0)  # one group to kill; the server does so too, and the second call changes nothing
        supervisor.close()
        os.close(self._answers)
        self._detach()
        log, heartbeat, _ = descriptors
        become_rank(order.environment | order.variables | {PARENT: str(self._pid)}, log, heartbeat)
        sys.argv = [str(self._rank_module.__file__), order.spec]
        return int(self._rank_module.main(order.spec))

    def _detach(self) -> None:
        """In a forked process: end with the server, close what is its own, handle signals, differ in random numbers."""
        os.environ[PARENT] = str(self._pid)
        die_with_supervisor()
        for key in list(self._events.get_map().values()):
            key.fileobj.close() if isinstance(key.fileobj, socket.socket) else os.close(key.fd)
        self._events.close()
        random.seed()
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED)

    def _report_end(self, rank: _Rank) -> None:
        """Send the status. The process stays a zombie until the supervisor closes: its number must not be another's."""
        if rank not in self._ranks or rank.pidfd not in self._events.get_map():
            return  # a later event of one call to `select`
        self._events.unregister(rank.pidfd)
        if rank.supervisor.fileno() < 0:
            self._reap(rank)
            return
        done = os.waitid(os.P_PIDFD, rank.pidfd, os.WEXITED | os.WNOWAIT)
        assert done is not None
        status = done.si_status if done.si_code == os.CLD_EXITED else -done.si_status
        with suppress(OSError):  # the supervisor is gone
            rank.supervisor.send(str(status).encode())

    def _end_rank(self, rank: _Rank) -> None:
        """The supervisor has read the status, or it is gone."""
        self._events.unregister(rank.supervisor)
        rank.supervisor.close()
        with suppress(OSError):  # none is left, or another user's
            os.killpg(rank.pid, signal.SIGKILL)
        if rank.pidfd not in self._events.get_map():  # it has ended; else its end reaps it
            self._reap(rank)

    def _reap(self, rank: _Rank) -> None:
        os.waitpid(rank.pid, 0)
        os.close(rank.pidfd)
        self._ranks.remove(rank)


def _has_closed(supervisor: socket.socket) -> bool:
    """Whether a supervisor has not waited, and starts a program instead."""
    supervisor.setblocking(False)
    with suppress(BlockingIOError):
        return not supervisor.recv(1, socket.MSG_PEEK)
    return False


def comparable(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that must be equal in a server and in an order: all but Dask's and Paceline's own."""
    return {name: value for name, value in environment.items() if not name.startswith((*DASK_PREFIXES, "PACELINE_"))}


def _leave(program: Callable[[], int]) -> NoReturn:
    """Run the work of a forked process, and end the process before it returns to the code of the server."""
    status = 1
    try:
        status = program()
    except SystemExit as leaving:  # as the interpreter does
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        sys.stderr.write("" if isinstance(leaving.code, int | None) else f"{leaving.code}\n")
    except BaseException:  # noqa: BLE001  into the log
        traceback.print_exc()
    finally:
        with suppress(Exception):  # the user's code may have closed it
            sys.stdout.flush()
        os._exit(status)


def main(listening: int, environment: int, rank_module: str, answer_module: str, *before: str) -> NoReturn:
    """Import the modules, fork the process that answers requests, and serve orders."""
    die_with_supervisor()
    signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    started_with = dict(os.environ)  # engines change it when they are imported
    with os.fdopen(environment) as file:
        file.seek(0)
        of_flow = json.load(file)
    requests, answers, nothing = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)  # so that imports do not print into the answers
    gc.disable()  # until ranks start: searching the imported modules for garbage takes a quarter of the time
    for name in before:
        with suppress(Exception):  # what was forked imports it again, and reports what fails
            importlib.import_module(name)
    server = _Server(socket.socket(fileno=listening), started_with, requests, answers)
    if answer_module:
        server.answer(answer_module, of_flow)
    else:
        os.close(requests)
    server.serve(rank_module)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
