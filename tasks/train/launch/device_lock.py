"""Per-host device lock (flock); the kernel releases it when the last process holding it exits.

The supervisor takes the lock and the rank inherits it, so a device is not free while either of them lives. The file's
content names the holder, for people to read. Clusters that share a host respect each other's locks.

All users can write to the directory, so a file in it may be a trap: links are not followed, and contents are only
displayed. Another user can block a device with a file, and do nothing else.
"""

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
from paceline.tasks.records.record import Record

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$", max_length=255)]


class LockHolder(Record):
    """The rank that uses a device."""

    run_id: Name
    rank: int
    host: Name
    pid: int  # process id of the Dask worker that supervises the rank
    since: float  # Unix time


class DeviceLock:
    """The lock of one device."""

    def __init__(self, directory: Path, device: str) -> None:
        directory.parent.mkdir(parents=True, exist_ok=True)
        try:
            directory.mkdir()
            directory.chmod(0o1777)  # all users can create lock files in it, and none can remove another's
        except FileExistsError:
            if directory.is_symlink() or not directory.is_dir():
                remedy = "remove it or use another path, the same for all users of the devices"
                raise RunError(f"PACELINE_LEASES={directory} is a link or not a directory; {remedy}") from None
        self._path = directory / (re.sub(r"[^\w.-]", "_", device) + ".lease")
        self._file: int | None = None

    def take(self, run_id: str, rank: int) -> bool:
        """Lock the device if it is free; return whether it was."""
        if (file := self._open_existing()) is None:
            try:
                file = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
            except FileExistsError:  # another process was faster
                return False
            except PermissionError as error:
                raise self._unusable(error.strerror) from error
            os.fchmod(file, 0o666)  # whatever the umask: trainings of other users must read it
        is_ours = False
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = os.fstat(file).st_nlink > 0  # else its holder has removed it since it was opened
        if not is_ours:
            os.close(file)
            return False
        self._file = file
        owner = LockHolder(run_id=run_id, rank=rank, host=socket.gethostname(), pid=os.getpid(), since=time.time())
        with contextlib.suppress(OSError):  # no space left: the lock works without the text
            os.ftruncate(file, 0)
            os.pwrite(file, owner.model_dump_json().encode(), 0)
        return True

    def fileno(self) -> int:
        """File descriptor of the lock, for the rank to inherit."""
        assert self._file is not None
        return self._file

    def release(self) -> None:
        """Release the lock after the rank has ended."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # in another user's directory
                self._path.unlink()
            os.close(self._file)
            self._file = None

    def owner(self) -> LockHolder | None:
        """The holder of the device; None when it is free."""
        file = self._open_existing()
        if file is None:
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
        except BlockingIOError:
            with contextlib.suppress(ValidationError):  # it is being written
                return LockHolder.model_validate_json(os.pread(file, 4096, 0))
            return LockHolder(run_id="unknown", rank=0, host=socket.gethostname(), pid=0, since=time.time())
        finally:
            os.close(file)

    def _open_existing(self) -> int | None:
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
            raise self._unusable("it is a link or not a regular file")
        return file

    def _unusable(self, reason: str | None) -> RunError:
        fault = f"{self._path} cannot be locked by this user ({reason})"
        return RunError(f"{fault}; ask its owner or an administrator to remove it")
