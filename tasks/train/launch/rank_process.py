"""The process of a rank on its worker: prepared, started, listed and stopped."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import psutil

from paceline.tasks.cluster.hardware import cpu_kind
from paceline.tasks.files import private_directory
from paceline.tasks.train.launch.device_lock import DeviceLock
from paceline.tasks.train.launch.fork_server import fork_rank
from paceline.tasks.train.launch.heartbeat import VARIABLE, HeartbeatReader
from paceline.tasks.train.launch.layout import rank_environment
from paceline.tasks.train.launch.standby import PARENT, Standby, take
from paceline.tasks.train.rank_spec import RankSpec

GRACE_SECONDS = 1.5
RANK_MODULE = "paceline.tasks.train.rank.main"

_ready: list[Standby] = []
_fork_servers: list[str] = []
"""Address of the fork server that forks the first rank of this worker; later ones are programs of their own."""


class RankProcess(Protocol):
    """Interface of a rank's process that a supervisor needs, see `subprocess.Popen`."""

    pid: int

    def poll(self) -> int | None: ...  # noqa: D102

    def wait(self, timeout: float | None = None) -> int: ...  # noqa: D102


def use_fork_server(address: str) -> None:
    """Have that fork server start the first rank of this worker, if it can; runs on the worker."""
    _fork_servers[:] = [address]


def keep_ready(num_threads: int, host: str, devices: tuple[str, ...], before: tuple[str, ...] = ()) -> None:
    """Start a standby process for a rank of this worker; runs on the worker."""
    environment = rank_environment(os.environ, num_threads, interface_of(host), devices)
    _ready.append(Standby(environment, RANK_MODULE, *before))


def start_rank(spec: RankSpec, spec_path: Path, device_lock: DeviceLock, heartbeat: HeartbeatReader) -> RankProcess:
    """Start a rank: by the fork server or in a standby process if there is one, else as a new program."""
    environment = rank_environment(os.environ, spec.plan.num_threads, spec.interface, spec.devices)
    if spec.python_path:  # no standby has this environment
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (spec.python_path, environment.get("PYTHONPATH"))))
    variables = {
        # Torch does not distinguish kinds of CPU.
        "TORCHINDUCTOR_CACHE_DIR": str(private_directory(Path(spec.compile_cache)) / cpu_kind()),
        "PACELINE_SPAWNED_AT": repr(time.monotonic()),  # one clock for all processes of a host
        PARENT: str(os.getpid()),
    }
    try:
        with (spec_path.parent / "log.txt").open("ab") as log:
            descriptors = [log.fileno(), heartbeat.writing, device_lock.fileno()]
            if _fork_servers:
                forked = fork_rank(_fork_servers.pop(), spec_path, environment, variables, descriptors)
                if forked is not None:
                    return forked
                log.write(b"the fork server did not fork this rank, so it is a program of its own\n")
                log.flush()
            if (standby := take(_ready, environment)) is not None:
                process = standby.start(spec_path, variables, log.fileno(), heartbeat.writing, device_lock.fileno())
                if process is not None:
                    return process
            return subprocess.Popen(
                [sys.executable, "-P", "-m", RANK_MODULE, str(spec_path)],
                env=environment | variables | {VARIABLE: str(heartbeat.writing)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(device_lock.fileno(), heartbeat.writing),
                start_new_session=True,  # one group to kill, and a terminal's Ctrl-C reaches the coordinator alone
            )
    finally:
        os.close(heartbeat.writing)  # this process's copy, or the rank's end would not be noticed


def end_group(process: RankProcess) -> None:
    """Stop a rank and all processes it started: SIGTERM, then SIGKILL."""
    if process.poll() is None:
        _signal_group(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE_SECONDS)
    _signal_group(process, signal.SIGKILL)  # the children may live longer than the leader
    process.wait()


def _signal_group(process: RankProcess, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def running_ranks(run_id: str) -> list[int]:
    """Process ids of this host's ranks of a run, by the spec in their command or the log that they write."""
    pids = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if RANK_MODULE in command and any(f"/{run_id}/" in path for path in (*command, log_of(process.pid))):
            pids.append(process.pid)
    return pids


def supervisors_of(ranks: Iterable[int]) -> list[int]:
    """Process ids of the parents of ranks: Dask workers or a fork server. On GPUs a worker may hold a CUDA context."""
    workers = []  # not their nannies: one nanny's process may start the workers of several trainings
    for pid in ranks:
        with contextlib.suppress(psutil.Error):  # it has ended
            workers.append(psutil.Process(pid).ppid())
    return [pid for pid in workers if pid > 1]  # a rank that has lost its worker is a child of the first process


def log_of(pid: int) -> str:
    """The file that a rank prints to; empty if unknown."""
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        files = (str(descriptor.readlink()) for descriptor in Path(f"/proc/{pid}/fd").iterdir())
        return next((file for file in files if file.endswith("/log.txt")), "")
    return ""


def interface_of(address: str) -> str | None:
    """This host's network interface with that address, so that gloo does not offer 127.0.0.1 to other hosts."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, entries in interfaces if address in [entry.address for entry in entries]), None)
