"""Ledgers: all candidates that were judged against one base, and so the level of the next one."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from paceline.tasks.errors import InputError
from paceline.tasks.files import exclusive, write_durably
from paceline.tasks.judge.lord import next_level
from paceline.tasks.judge.records import Outcome
from paceline.tasks.measure.paired_ratio import Interval
from paceline.tasks.records.record import Record

KEY_LENGTH = 12


class Base(Record):
    """What candidates are compared with: a command in a directory, at a commit where revisions of git are compared.

    Not at HEAD where commands are: a loop may commit each of its candidates, and they are all of one ledger.
    """

    command: str
    directory: str
    commit: str | None = None

    @property
    def key(self) -> str:
        """Name of the base's ledger where none is given."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:KEY_LENGTH]


class Candidate(Record):
    """A candidate; one whose judgement was stopped or failed after its first look stays UNFINISHED."""

    number: int
    time: str  # UTC, ISO 8601
    command: str
    outcome: Outcome | Literal["UNFINISHED"] = "UNFINISHED"
    ratio: Interval | None = None
    level: float
    run_id: str | None = None  # None where MLflow has not taken the judgement


class Ledger(Record):
    """The candidates of a base in the order of their judgements."""

    name: str
    base: Base
    candidates: tuple[Candidate, ...] = ()

    @property
    def next_level(self) -> float:
        """Chance of a false KEEP that the next candidate may spend."""
        return next_level([each.outcome == "KEEP" for each in self.candidates])


@contextmanager
def open_ledger(folder: Path, base: Base, name: str | None) -> Iterator[tuple[Ledger, Callable[[Candidate], None]]]:
    """A ledger and a function that writes the next candidate, also in place of its last writing; nobody else uses it.

    Raises InputError: it is in use, of another base, or damaged.
    """
    name = name or base.key
    folder.mkdir(parents=True, exist_ok=True)
    path, lock = folder / f"{name}.json", folder / f"{name}.lock"
    lock.touch()
    with ExitStack() as stack:
        try:
            stack.enter_context(exclusive(lock))
        except BlockingIOError as error:
            fault = f"--ledger {name} is in use by another judgement, and a level depends on all earlier outcomes"
            raise InputError(fault, hint="wait until it has ended") from error
        ledger = read_ledger(path) if path.exists() else Ledger(name=name, base=base)
        if ledger.base != base:
            was = f"{ledger.base.command} in {ledger.base.directory}"
            was += f" at commit {ledger.base.commit[:KEY_LENGTH]}" if ledger.base.commit else ""
            raise InputError(f"--ledger {name} is of another base: {was}", hint=f"--ledger {base.key}")

        def put(candidate: Candidate) -> None:
            longer = ledger.model_copy(update={"candidates": (*ledger.candidates, candidate)})
            write_durably(path, longer.model_dump_json(indent=1).encode())

        yield ledger, put


def read_ledger(path: Path) -> Ledger:
    """Read a ledger; InputError if it is damaged."""
    try:
        return Ledger.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise InputError(f"--ledger {path.stem}: {path} is damaged", hint="--ledger another") from error
