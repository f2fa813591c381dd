"""Lock of a run's directory: one process at a time trains a run."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.tasks.errors import InputError
from paceline.tasks.files import make_directory, sync_directory

NUM_TRIES = 5
TRY_SECONDS = 0.05  # `is_locked` holds the lock for an instant


def is_locked(directory: Path) -> bool | None:
    """Whether a process holds the run now; None where none ever did, or the file is another user's."""
    try:
        with (directory / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, PermissionError):
        return None
    except BlockingIOError:
        return True
    return False


@contextmanager
def run_lock(directory: Path) -> Iterator[None]:
    """Hold the lock during the body, at most until this process dies. Raises InputError: another one trains the run."""
    make_directory(directory)
    with os.fdopen(os.open(directory / "lock", os.O_CREAT | os.O_RDWR, 0o644), "rb") as lock:
        sync_directory(directory)  # after a loss of power, only the file shows that a process held it
        for num_tries_left in range(NUM_TRIES, -1, -1):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if not num_tries_left:
                    advice = "wait for its end or stop it first"
                    raise InputError(f"run {directory.name} is being trained by another process; {advice}") from error
                time.sleep(TRY_SECONDS)
        yield
