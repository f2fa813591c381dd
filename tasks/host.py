"""Which host this is, for whom a process id means something. A leaf; knows nothing of clusters."""

from __future__ import annotations

import shutil
import socket
from functools import cache
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PID_NAMESPACE = Path("/proc/self/ns/pid")


@cache
def host_identity() -> str:
    """Name, boot and process namespace: cloned machines and containers share the name, and mean other processes."""
    boot = BOOT_ID.read_text(encoding="utf-8").strip()[:8] if BOOT_ID.exists() else ""
    namespace = str(PID_NAMESPACE.readlink()) if PID_NAMESPACE.exists() else ""
    return " ".join(part for part in (socket.gethostname(), boot, namespace) if part)


def has_compiler() -> bool:
    """Whether this host has the C++ compiler that torch.compile needs on CPUs."""
    return any(map(shutil.which, ("c++", "g++", "clang++")))
