"""Records of a judgement: the question, what each process took and printed, the outcome."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal

from paceline.tasks.measure.paired_ratio import Interval
from paceline.tasks.records.record import Record
from paceline.tasks.speedup.study.records import Parity

NAME = re.compile("[0-9a-f]{40,64}")  # of a commit
SideName = Literal["old", "new", "good", "middle", "bad"]  # the last three in a search
Outcome = Literal["KEEP", "DISCARD", "RETEST"]
JudgedParity = Parity | Literal["not worse"]  # surely no loss above the margin; a gain above it is possible
Defer = Callable[[], AbstractContextManager[None]]  # delays a signal until the end of the body
ORDERS: tuple[tuple[SideName, ...], ...] = (("old", "new", "new", "old"), ("new", "old", "old", "new"))
"""Orders of a round; a coin chooses. In both, a steady drift of the machine falls on both sides alike."""


class Side(Record):
    """A command for a shell: the user's, or a training by Paceline."""

    name: SideName
    command: str
    directory: str
    revision: str | None = None  # of git
    shown: str | None = None  # in place of the command, for people

    @property
    def label(self) -> str:
        """The side for people, on one line."""
        return " ".join(f"{self.revision + ': ' if self.revision else ''}{self.shown or self.command}".split())


class Commit(Record):
    """A commit of git, or a change of a package or a setting: its name, and its values."""

    name: str
    subject: str

    @property
    def label(self) -> str:
        """The commit for people."""
        return f"{self.name[:12] if NAME.fullmatch(self.name) else self.name} {self.subject}"


class MlflowMetric(Record):
    """A metric that the sides log to MLflow."""

    name: str
    tracking_uri: str


class Question(Record):
    """The two sides, and how their output is read."""

    old: Side
    new: Side
    metric: str | None = None  # regular expression; its last match in the output of a process is the metric
    metric_key: str | None = None  # or a key of the last line of JSON that has it; dots lead into inner objects
    logged: MlflowMetric | None = None  # or a metric in MLflow
    steps: str | None = None  # regular expression over times of single steps, seconds
    rate_key: str | None = None  # of a training by Paceline: as `metric_key`, samples per second
    is_marked: bool | None = None  # whether the sides mark their steps; None before the first process has ended
    lower_is_better: bool = False
    margin: float | None = None  # None for a share of the old side's metric
    budget_seconds: float
    limit_seconds: float  # of one process


class ProcessRun(Record):
    """A finished process of a side."""

    seconds: float  # of the process, from start to exit; of a step or a sample, where the question is about those
    metric: float | None = None
    run_id: str | None = None  # in MLflow: of a training by Paceline, or of a program that logs its metric there
    read_bytes: int = 0  # from disks, not from the page cache; of the process and its children that have ended
    num_steps: int = 0  # marked ones that `seconds` is the median of; 0 where it is of something else
    contaminated: tuple[str, ...] = ()  # of a training by Paceline: signs of other work while it trained


class Round(Record):
    """Two processes of each side, next to each other in time."""

    order: tuple[SideName, ...]
    runs: tuple[ProcessRun, ...]
    seconds: float  # of the round altogether
    contaminated: tuple[str, ...] = ()  # signs of other work on the machine; such a round does not count

    @property
    def reasons(self) -> tuple[str, ...]:
        """What contaminated its trainings."""
        return tuple(dict.fromkeys(reason for run in self.runs for reason in run.contaminated))

    def of(self, name: SideName) -> list[ProcessRun]:
        """The runs of a side."""
        return [run for side, run in zip(self.order, self.runs, strict=True) if side == name]


class Decision(Record):
    """The outcome of the rounds so far."""

    outcome: Outcome
    reason: str
    num_rounds: int = 0  # that count
    ratio: Interval | None = None  # throughput of the new side over that of the old one
    parity: JudgedParity = "unknown"
    difference: Interval | None = None  # of the metric, new less old, with the sign that makes more better
    margin: float | None = None
    needed_rounds: int | None = None  # about so many would decide a RETEST; None where it is not one, or none would
    needed_seconds: float | None = None


class Judgement(Decision):
    """A judgement as it is recorded and printed."""

    old: str
    new: str
    ledger: str
    candidate: int  # its number in the ledger
    level: float  # chance of a false KEEP that it could spend
    seconds: float
    old_seconds: float | None  # median of a process, a step or a sample
    new_seconds: float | None
    is_training: bool = False  # the sides are trainings by Paceline, so that the seconds are those of a sample
    rounds: tuple[Round, ...]  # the contaminated ones among them
    run_id: str | None = None
    experiment: str | None = None

    @property
    def valid_rounds(self) -> tuple[Round, ...]:
        """The rounds that count."""
        return tuple(each for each in self.rounds if not each.contaminated)
