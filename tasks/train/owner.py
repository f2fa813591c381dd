"""One process at a time trains a run: the lock that says who."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.errors import InputError


def is_owned(directory: Path) -> bool | None:
    """Whether a process holds the run of a directory now; None where no process ever did."""
    try:
        lock = os.open(directory / "lock", os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(lock)


@contextmanager
def own(directory: Path) -> Iterator[None]:
    """Hold the run of a directory while the body lasts; the kernel lets go of it when this process dies.

    Raises:
        InputError: another process trains this run now.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lock = os.open(directory / "lock", os.O_CREAT | os.O_RDWR, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"run {directory.name} is being trained by another process now; wait for its end or stop it first"
            ) from error
        yield
    finally:
        os.close(lock)
