"""Identity and capabilities of this host."""

import ctypes
import os
import shutil
import signal
import socket
import struct
from contextlib import suppress
from functools import cache
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PID_NAMESPACE = Path("/proc/self/ns/pid")
M_MMAP_THRESHOLD = -3  # of `mallopt`
MOST_KEPT, MOST_MAPPED = 8 * 2**30, 4 * 2**30
MAPPED_OF_OLD = 32 * 2**20
"""Largest threshold that older glibc (such as 2.34) accepts. It ignores a larger one, and then maps each block above
128 KiB again at every allocation."""


@cache
def host_identity() -> str:
    """Name, boot and process namespace: cloned machines and containers share the name, and mean other processes."""
    boot = BOOT_ID.read_text(encoding="utf-8").strip()[:8] if BOOT_ID.exists() else ""
    namespace = str(PID_NAMESPACE.readlink()) if PID_NAMESPACE.exists() else ""
    return " ".join(part for part in (socket.gethostname(), boot, namespace) if part)


def has_compiler() -> bool:
    """Whether this host has the C++ compiler that torch.compile needs on CPUs."""
    return any(map(shutil.which, ("c++", "g++", "clang++")))


@cache
def keep_memory() -> dict[str, str]:
    """Variables by which a process that lives for one piece of work keeps the memory that it frees.

    Unless conf/dask/dask.yaml is used, a worker's nanny has its children give memory back at once
    (MALLOC_TRIM_THRESHOLD_=65536). A rank that inherits this faults its activations in again at every step: 1.9 x the
    time of a CIFAR-10 step in bf16, 2.6 x in fp32. With glibc's own defaults fp32 still takes 1.6 x, for activations
    above 32 MB are mapped again each time (2026-11-21, infra/LOG.md).
    """
    mapped = MOST_MAPPED if _takes_more() else MAPPED_OF_OLD
    return {"MALLOC_TRIM_THRESHOLD_": str(MOST_KEPT), "MALLOC_MMAP_THRESHOLD_": str(mapped)}


def _takes_more() -> bool:
    """Whether this host's glibc takes a larger threshold; this process has one of that limit from now on."""
    try:
        return bool(ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAPPED_OF_OLD + 1) == 1)
    except AttributeError:  # another C library
        return False


def process_fields(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; empty if the process is gone, and on systems without /proc."""
    with suppress(OSError):
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return text.rpartition(")")[2].split()  # the name before may hold anything
    return []


def started_at(pid: int) -> int | None:
    """When a process was started, in clock ticks since the machine came up; None if it does not live, as a zombie."""
    fields = process_fields(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else None


def process_start() -> float | None:
    """When this process was started, in seconds since the machine came up; None on systems without /proc."""
    started = started_at(os.getpid())
    return None if started is None else started / os.sysconf("SC_CLK_TCK")


program_start: float | None = None
"""When the program `paceline` was started, as `process_start`; None in a warm pool, and in a process of the user's."""


def find_program_start(now: float, processor: float) -> float | None:
    """When the program of this process was started: its first lines read the two clocks `now` and `processor`.

    A script may install or wait for long before it becomes this program with `exec`. The kernel keeps no time of that,
    and the processor time so far is about what the start of the interpreter took.
    """
    started = process_start()
    return now - processor if started is not None and now - started > SCRIPT_SECONDS else started


PR_SET_PDEATHSIG = 1
SCRIPT_SECONDS = 20.0
"""A process that is older at the first line of its program is taken for a script that has become this program."""


def peer_user(connection: socket.socket) -> int:
    """User id of the other end of a connected Unix socket; of a listening one, of the process that listens."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(user)


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it died before the request
