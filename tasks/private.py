"""Directories of what is executed later: machine code, and what compilers keep for themselves.

Whoever can write there runs code as whoever reads there. So every user has one's own, on a shared disk too. A leaf.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from tasks.errors import RunError

OTHERS_WRITE = 0o022


def private_directory(parent: Path) -> Path:
    """The directory below a parent in which only this process's user can write; made if it is not there.

    Raises:
        RunError: what is there is somebody else's, a link, or others can write to it.
    """
    user = os.geteuid()
    directory = parent / f"user-{user}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        status = directory.lstat()
    except OSError as error:
        raise RunError(f"{directory} cannot be made ({error.strerror}); let this user write to {parent}") from error
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != user or mode & OTHERS_WRITE:
        raise RunError(
            f"{directory} is to hold code that is executed, and user {status.st_uid} owns it with mode {mode:o}; it "
            f"must be a directory of user {user} that nobody else can write to: remove it, or move PACELINE_HOME to a "
            "disk that knows owners and modes"
        )
    return directory
