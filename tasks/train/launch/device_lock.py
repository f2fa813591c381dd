"""The right to use a device: one owner at a time on a host, by a lock that the kernel lets go of with its last holder.

The supervisor takes the lock and the rank inherits it, so a device is not free while either of them lives, and needs
nobody to free it. The file's content says to people who the owner is. Knows nothing of clusters: two that share a host
respect each other.

The directory is everybody's, so whatever lies in it may be a trap: links are not followed, and what is read there is
only ever shown. Another user can keep a device by it, and nothing else.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import stat
import time
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from paceline.tasks.errors import RunError
from paceline.tasks.records import Record

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$", max_length=255)]


class LockHolder(Record):
    """Who uses a device."""

    run_id: Name
    rank: int
    host: Name
    pid: int
    """Of the Dask worker that supervises the rank."""
    since: float
    """Unix time."""


class DeviceLock:
    """One try for a device, or its possession.

    Args:
        directory: of this host's leases, the same for all who share its devices.
        device: a name that no two devices of the host share, such as a GPU's UUID.
    """

    def __init__(self, directory: Path, device: str) -> None:
        _make_for_all(directory)
        self._path = directory / (re.sub(r"[^\w.-]", "_", device) + ".lease")
        self._file: int | None = None

    def take(self, run_id: str, rank: int) -> bool:
        """Take the device if it is free; whether it is ours now."""
        try:
            file = self._open_or_make()
        except FileExistsError:  # somebody was quicker
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        if os.fstat(file).st_nlink == 0:  # its owner has removed it since it was opened
            os.close(file)
            return False
        self._file = file
        owner = LockHolder(run_id=run_id, rank=rank, host=socket.gethostname(), pid=os.getpid(), since=time.time())
        with contextlib.suppress(OSError):  # no space left: the lock holds without the text, which is for people
            os.ftruncate(file, 0)
            os.pwrite(file, owner.model_dump_json().encode(), 0)
        return True

    def fileno(self) -> int:
        """Descriptor of the lock, for the rank to inherit."""
        assert self._file is not None
        return self._file

    def beat(self) -> None:
        """Say, for people who look at the file, that the owner lives."""
        os.utime(self.fileno())

    def release(self) -> None:
        """Let go, after the rank has ended."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # in another user's directory
                self._path.unlink()
            os.close(self._file)
            self._file = None

    def owner(self) -> LockHolder | None:
        """Who has the device now; None when it is free."""
        file = self._open_if_there()
        if file is None:
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            with contextlib.suppress(ValidationError):  # it is being written just now
                return LockHolder.model_validate_json(os.pread(file, 4096, 0))
            return LockHolder(run_id="unknown", rank=0, host=socket.gethostname(), pid=0, since=time.time())
        else:
            return None
        finally:
            os.close(file)

    def _open_if_there(self) -> int | None:
        """The file's descriptor; None if nobody has the device.

        Raises:
            RunError: it is a trap, or kept from this user.
        """
        try:
            # Without O_CREAT: in a directory for all, kernels refuse it for another user's file (fs.protected_regular).
            file = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._unusable(error.strerror) from error
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            os.close(file)
            raise self._unusable("it is a link to something else, or no file")
        return file

    def _open_or_make(self) -> int:
        found = self._open_if_there()
        if found is not None:
            return found
        try:
            file = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
        except PermissionError as error:
            raise self._unusable(error.strerror) from error
        os.fchmod(file, 0o666)  # whatever the umask: other users' trainings must see it
        return file

    def _unusable(self, reason: str | None) -> RunError:
        return RunError(
            f"{self._path} is no lease that this user can take ({reason}); have its owner or an administrator remove it"
        )


def _make_for_all(directory: Path) -> None:
    """Make the directory where all users of the host leave their leases, and none removes another's.

    Raises:
        RunError: what is there is no directory.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        directory.mkdir()
    except FileExistsError:
        if directory.is_symlink() or not directory.is_dir():
            raise RunError(
                f"PACELINE_LEASES={directory} is no directory of its own; remove what is there, or name another, "
                "the same for all who share the devices"
            ) from None
    else:
        directory.chmod(0o1777)
