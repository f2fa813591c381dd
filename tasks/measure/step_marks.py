"""Marks of training steps in a program that is judged. Imports nothing that takes time: any program may import it."""

import os
import time
from functools import cache

VARIABLE = "PACELINE_STEPS"  # names the file of the marks; set by `paceline judge` and `paceline bisect`


def step() -> None:
    """Mark the end of a training step. It does nothing outside of `paceline judge` and `paceline bisect`."""
    file, owner = _open_marks()
    if file is not None and owner == os.getpid():  # a process that was forked later has the cached file, too
        os.write(file, b"%r\n" % time.monotonic())


@cache
def _open_marks() -> tuple[int | None, int]:
    """The file of the marks, None in all processes of a program except the first that marks a step; this process."""
    try:
        return os.open(os.environ[VARIABLE], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), os.getpid()
    except (KeyError, OSError):
        return None, os.getpid()
