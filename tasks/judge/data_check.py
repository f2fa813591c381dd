"""Whether a side changes the data that it reads: the processes after it would find other data.

Nobody knows what a program reads. Watched are the files that its command names, those in directories that it names
outside of the side's own directory, and those that git tracks in the side's own directory. What appears after the
snapshot is a result. So is a file to which the shell writes the output.
"""

import shlex
import stat
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice, pairwise
from pathlib import Path

from paceline.tasks.errors import InputError
from paceline.tasks.judge.records import ProcessRun, Question, Side

MAX_FILES = 4000  # of a side, those that its command names first
NO_DATA = {"cd", ">", ">>", ">|", "&>", "&>>", ">&"}  # the word behind one of these names no data
Run = Callable[[Side, Question], ProcessRun]


def refuse_changed_data(run: Run, sides: Sequence[Side]) -> Run:
    """Wrap `run`: it raises InputError if the first process of one of the sides changes data that are there now."""
    before = {
        side.name: {path: state for path in islice(_data_files(side), MAX_FILES) if (state := _state(path))}
        for side in sides
    }

    def checked(side: Side, question: Question) -> ProcessRun:
        found = run(side, question)
        changed = [str(path) for path, state in before.pop(side.name, {}).items() if _state(path) != state]
        if changed:
            names = changed[0] + (f" and {len(changed) - 1} more files" if len(changed) > 1 else "")
            fault = f"--{side.name} {side.label}: it changes {names}, and later processes would find other data"
            hint = "remove results of earlier runs, or let it write elsewhere; then restore the data"
            raise InputError(fault, hint=hint, setting=f"--{side.name}")
        return found

    return checked


def _data_files(side: Side) -> Iterator[Path]:
    place = Path(side.directory)
    words = shlex.shlex(side.command, posix=True, punctuation_chars=True)
    words.whitespace_split = True
    named = []
    with suppress(ValueError):  # a quote without an end, of which the shell will complain
        named = [place / word.split("=")[-1] for before, word in pairwise(["", *words]) if before not in NO_DATA]
    for path in named:
        with suppress(OSError, ValueError):
            if path.is_dir() and not path.resolve().is_relative_to(place.resolve()):
                yield from (each for each in sorted(path.rglob("*")) if not _is_hidden(each.relative_to(path)))
            else:
                yield path
    with suppress(OSError):
        git = ["git", "-C", side.directory, "ls-files", "-z"]
        listed = subprocess.run(git, capture_output=True, errors="surrogateescape", check=False).stdout
        yield from (place / name for name in listed.split("\0") if name)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def _state(path: Path) -> tuple[int, int] | None:
    """Size and time of the last change of a file; None for what is none."""
    with suppress(OSError, ValueError):
        found = path.stat()
        if stat.S_ISREG(found.st_mode):
            return found.st_size, found.st_mtime_ns
    return None
