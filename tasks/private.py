"""Directories of what is executed or trusted later: machine code, what compilers keep, what was fetched from afar.

Whoever can write there decides what whoever reads there runs or learns. So every user has one's own, on a shared disk
too. A leaf.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from tasks.errors import RunError

OTHERS_WRITE = 0o022


def private_directory(parent: Path, purpose: str = "code that is executed") -> Path:
    """The directory below a parent in which only this process's user can write; made if it is not there.

    Args:
        parent: Shared by all users.
        purpose: What it is to hold, for messages.

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
            f"{directory} is to hold {purpose}, and user {status.st_uid} owns it with mode {mode:o}; it "
            f"must be a directory of user {user} that nobody else can write to: remove it, or move PACELINE_HOME to a "
            "disk that knows owners and modes"
        )
    return directory
