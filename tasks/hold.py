"""Shared locks of files that a process uses, which keep them from `paceline clean` until the process ends."""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_held: dict[tuple[int, int], int] = {}  # device and inode of each file that this process holds, with its descriptor

logger = logging.getLogger(__name__)


def hold(path: Path) -> bool:
    """Hold a file until this process ends, and set its time to now; return whether the file is there."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    identity = _identity(os.fstat(descriptor))
    if identity in _held:
        os.close(descriptor)
        return True
    _held[identity] = descriptor
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # waits for a clean-up, which holds it for an instant
        if _identity(path.stat()) == identity:
            with suppress(OSError):  # another user's
                os.utime(path)
            return True
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("%s cannot be locked (%s): call paceline clean only while nothing runs", path, error.strerror)
        return True
    os.close(_held.pop(identity))
    return False


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Lock a file that no process holds.

    Raises BlockingIOError: a process holds it; FileNotFoundError: it is gone; OSError: it cannot be locked.
    """
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CLOEXEC), "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _identity(path.stat()) != _identity(os.fstat(file.fileno())):
            raise FileNotFoundError(path)  # another file has its name now
        yield


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
