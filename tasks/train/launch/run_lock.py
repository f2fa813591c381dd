"""Lock of a run's directory: one process at a time trains a run."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.tasks.errors import InputError

NUM_TRIES = 5
TRY_SECONDS = 0.05  # `is_locked` holds the lock for an instant


def is_locked(directory: Path) -> bool | None:
    """Whether a process holds the run now; None where none ever did, or the file is another user's."""
    try:
        lock = os.open(directory / "lock", os.O_RDONLY)
    except (FileNotFoundError, PermissionError):
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(lock)


def _take(lock: int, name: str) -> None:
    for patience in (*[TRY_SECONDS] * NUM_TRIES, None):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if patience is None:
                raise InputError(
                    f"run {name} is being trained by another process; wait for its end or stop it first"
                ) from error
            time.sleep(patience)
        else:
            return


@contextmanager
def run_lock(directory: Path) -> Iterator[None]:
    """Hold the lock during the body; the kernel releases it when this process dies.

    Raises:
        InputError: another process trains this run.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lock = os.open(directory / "lock", os.O_CREAT | os.O_RDWR, 0o644)
    try:
        _take(lock, directory.name)
        yield
    finally:
        os.close(lock)
