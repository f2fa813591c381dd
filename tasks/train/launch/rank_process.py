"""A rank's process as its worker has it: kept ready, started, found and ended.

Knows nothing of claims, of coordinators, or of what a rank does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil

from paceline.tasks.cluster.hardware import cpu_kind
from paceline.tasks.files import private_directory
from paceline.tasks.train.launch.device_lock import DeviceLock
from paceline.tasks.train.launch.heartbeat import VARIABLE, HeartbeatReader
from paceline.tasks.train.launch.layout import rank_command, rank_environment
from paceline.tasks.train.launch.standby import PARENT, Standby, standby_command, take
from paceline.tasks.train.rank_spec import RankSpec

GRACE_SECONDS = 1.5
RANK_MODULE = "paceline.tasks.train.rank.main"

_ready: list[Standby] = []


def keep_ready(num_threads: int, host: str, devices: tuple[str, ...]) -> None:
    """Start a process that a rank of this worker can begin in; to be run on the worker.

    Args:
        num_threads: CPU threads of the rank.
        host: this host's address in the group.
        devices: GPU UUIDs of the host, in one order for all its ranks; empty on CPUs.
    """
    environment = rank_environment(os.environ, num_threads, interface_of(host), devices)
    _ready.append(Standby(standby_command(RANK_MODULE), environment))


def start_rank(spec: RankSpec, spec_path: Path, lease: DeviceLock, pulse: HeartbeatReader) -> subprocess.Popen[bytes]:
    """Start a rank, in a process that was kept ready for it if there is one."""
    environment = rank_environment(os.environ, spec.plan.num_threads, spec.interface, spec.devices)
    own = {
        # Torch tells no CPUs apart.
        "TORCHINDUCTOR_CACHE_DIR": str(private_directory(Path(spec.compile_cache)) / cpu_kind()),
        "PACELINE_SPAWNED_AT": repr(time.monotonic()),  # one clock for all processes of a host
        PARENT: str(os.getpid()),
    }
    try:
        with (spec_path.parent / "log.txt").open("ab") as log:
            ready = take(_ready, environment)
            if ready is not None:
                begun = ready.begin(spec_path, own, log.fileno(), pulse.writing, lease.fileno())
                if begun is not None:
                    return begun
            return subprocess.Popen(
                rank_command(spec_path),
                env=environment | own | {VARIABLE: str(pulse.writing)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(lease.fileno(), pulse.writing),
                start_new_session=True,  # one group to kill, and a terminal's Ctrl-C reaches the coordinator alone
            )
    finally:
        pulse.close_writing()


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a rank and everything it started: ask, then kill."""
    if process.poll() is None:
        _signal_group(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE_SECONDS)
    _signal_group(process, signal.SIGKILL)  # the leader may be gone while its children are not
    process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def running_ranks(run_id: str) -> list[int]:
    """Process ids of this host's ranks of a run, by the spec that they were started with or the log that they write."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if RANK_MODULE in command and any(f"/{run_id}/" in path for path in (*command, log_of(process.pid))):
            found.append(process.pid)
    return found


def log_of(pid: int) -> str:
    """The file that a process prints to; empty if it cannot be told."""
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        return str(Path(f"/proc/{pid}/fd/1").readlink())
    return ""


def interface_of(address: str) -> str | None:
    """Name of this host's network interface that carries `address`, so that gloo does not offer 127.0.0.1 to others."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return name
    return None
