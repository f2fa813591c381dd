"""Whether a side changes the data that it reads: the processes after it would find other data.

Nobody knows what a program reads. Watched are the files that its command names, and those that git tracks in its
directory. What appears after the snapshot is a result, and so is what the command names as its output.
"""

import re
import shlex
import stat
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice, pairwise
from pathlib import Path

from paceline.tasks.errors import InputError
from paceline.tasks.judge.records import ProcessRun, Question, Side
from paceline.tasks.judge.rounds import Run

MAX_FILES = 4000  # of a side, those that its command names first
BEFORE_OUTPUT = re.compile(r"\W*>\W*|cd|tee|-o|--out\w*")
"""The word behind it is a result, or the directory of what follows."""


def refuse_changed_data(run: Run, sides: Sequence[Side]) -> Run:
    """Wrap `run`: it raises InputError if the first process of one of the sides changes data that are there now."""
    files = {path for side in sides for path in islice(_data_files(side), MAX_FILES)}
    before = {path: state for path in files if (state := _state(path))}
    unchecked = {side.name for side in sides}

    def checked(side: Side, question: Question) -> ProcessRun:
        found = run(side, question)
        if side.name in unchecked:
            unchecked.remove(side.name)
            touched = [path for path, state in before.items() if _state(path) != state]
            if changed := sorted(str(path) for path in touched if not _is_committed(path)):
                names = changed[0] + (f" and {len(changed) - 1} more files" if len(changed) > 1 else "")
                fault = f"--{side.name} {side.label}: it changes {names}, and later processes would find other data"
                hint = "remove results of earlier runs, or let it write elsewhere; then restore the data"
                raise InputError(fault, hint=hint, setting=f"--{side.name}")
        return found

    return checked


def _data_files(side: Side) -> Iterator[Path]:
    place = Path(side.directory)
    lexer = shlex.shlex(side.command, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    words = []
    with suppress(ValueError):  # a quote without an end, of which the shell will complain
        words = ["", *lexer]
    for before, word in pairwise(words):
        key, _, value = word.rpartition("=")
        is_assignment = key and not key.startswith("-")
        if not (is_assignment or BEFORE_OUTPUT.fullmatch(before) or BEFORE_OUTPUT.fullmatch(key)):
            yield place / value
    with suppress(OSError):
        listed = _git(place, "ls-files", "-z").stdout
        yield from (place / name for name in listed.split("\0") if name)


def _state(path: Path) -> tuple[int, int] | None:
    """Size and time of the last change of a file; None for what is none."""
    with suppress(OSError, ValueError):
        found = path.stat()
        if stat.S_ISREG(found.st_mode):
            return found.st_size, found.st_mtime_ns
    return None


def _is_committed(path: Path) -> bool:
    """Whether a file that was written again has the content that git knows."""
    tracked = ("ls-files", "--error-unmatch", "--", str(path)), ("diff", "--quiet", "--", str(path))
    with suppress(OSError):
        return all(_git(path.parent, *words).returncode == 0 for words in tracked)
    return False


def _git(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = ["git", "-C", str(place), *words]
    return subprocess.run(command, capture_output=True, errors="surrogateescape", check=False)
