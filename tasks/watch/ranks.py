"""Ranks of a training that a launcher such as torchrun has started: processes with one parent and one address."""

import os
from collections.abc import Iterator
from contextlib import suppress

import psutil

GROUP = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that the ranks of a training have in common."""
SEVERAL_RANKS = "the training has several ranks"


def num_ranks() -> int:
    """Number of ranks of the training."""
    number = os.environ.get("WORLD_SIZE", "")
    return max(1, int(number)) if number.isdecimal() and "RANK" in os.environ else 1


def has_several_ranks() -> bool:
    """Whether this process is one of several ranks."""
    return num_ranks() > 1


def is_first_rank() -> bool:
    """Whether this process reports on the training: the first rank, or the only one."""
    return not has_several_ranks() or os.environ["RANK"] == "0"


def own_pids() -> list[int]:
    """Process ids of the training on this host: this process, and the other ranks that its parent has started."""
    return [os.getpid(), *(_siblings() if has_several_ranks() else ())]


def _siblings() -> Iterator[int]:
    group, parent = _group(psutil.Process()), psutil.Process().parent()
    if group is None or parent is None:
        return
    with suppress(psutil.Error):  # the parent has ended
        for child in parent.children():
            if child.pid != os.getpid() and _group(child) == group:
                yield child.pid


def _group(process: psutil.Process) -> list[str | None] | None:
    """Values of `GROUP` with which a process was started; None if it is not a rank or cannot be read."""
    try:
        variables = process.environ()
    except (psutil.Error, OSError):  # it has ended, or belongs to another user
        return None
    return [variables.get(name) for name in GROUP] if "RANK" in variables else None
