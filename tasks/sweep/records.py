"""The records of a sweep: its trials, and what was found. Knows nothing of how they are run, chosen or drawn."""

import math
from typing import Literal

from pydantic import Field

from paceline.conf.lightning import Objective
from paceline.tasks.measure.paired_ratio import Interval
from paceline.tasks.records.record import Choice, Record
from paceline.tasks.sweep.concurrency import Colocation
from paceline.tasks.sweep.space import Parameter, Scalar

Sampler = Literal["tpe", "random", "grid"]
Pruner = Literal["none", "median", "asha", "hyperband"]
Status = Literal["done", "pruned", "failed"]


class Proposal(Record):
    """A trial to run or to resume."""

    number: int  # from 0, in the order of their proposals
    values: dict[str, Scalar]  # by setting
    run_id: str | None = None  # MLflow run of a resumed trial; None for a new one


class Trial(Record):
    """A trial that has ended. None where unknown."""

    number: int
    values: dict[str, Scalar]
    run_id: str | None = None  # MLflow run, nested in the sweep's; None if none was created
    status: Status
    score: float | None = None  # validation split, after the last epoch; of a pruned trial after the last that it had
    scores: tuple[float, ...] = ()  # after each epoch
    test_score: float | None = None
    seconds: float  # wall time, the wait for a device included; of one that went on, since it did
    started: float  # Unix seconds
    restarts: int = 0  # number of restarts from its newest checkpoint
    samples_per_second: float | None = None
    error: str | None = None  # why it failed, or was pruned

    @property
    def end_time(self) -> float:
        """Unix seconds."""
        return self.started + self.seconds


class SweepResult(Record):
    """Everything a sweep found."""

    run_id: str
    experiment: str
    preset: str
    parameters: tuple[Parameter, ...]
    sampler: Sampler
    pruner: Pruner
    at_once: Choice  # trials at the same time, and why so many
    num_epochs: int
    score_name: str
    objective: Objective | None = None  # of own Lightning code: the metric that is the score
    trials: tuple[Trial, ...]  # in the order of their numbers
    colocation: Colocation | None = None  # what models give side by side on these devices
    no_colocation: str = ""  # why that was not measured
    seconds: float  # of the whole sweep
    hardware: str = ""
    versions: dict[str, str] = Field(default_factory=dict)

    @property
    def best(self) -> Trial | None:
        """The trial with the best score, of equals the first; None where none was done."""
        done = [trial for trial in self.trials if trial.status == "done" and trial.score is not None]
        return max(done, key=lambda trial: (self.sign * (trial.score or 0.0), -trial.number), default=None)

    @property
    def sign(self) -> int:
        """Factor that makes a larger score the better one."""
        return 1 if self.objective is None else self.objective.sign

    def overrides(self, trial: Trial) -> tuple[str, ...]:
        """`key=value` for each of a trial's settings."""
        used = [parameter for parameter in self.parameters if parameter.setting in trial.values]
        return tuple(parameter.override(trial.values[parameter.setting]) for parameter in used)

    def num(self, status: Status) -> int:
        """Number of trials that ended so."""
        return sum(trial.status == status for trial in self.trials)

    @property
    def busy_seconds(self) -> float:
        """In which at least one trial ran: breaks of a sweep that went on are left out."""
        total, until = 0.0, -math.inf
        for trial in sorted(self.trials, key=lambda trial: trial.started):
            total += max(0.0, trial.end_time - max(trial.started, until))
            until = max(until, trial.end_time)
        return total

    @property
    def occupancy(self) -> float | None:
        """Share of that time in which all that could run at once did."""
        slots = int(self.at_once.value) * self.busy_seconds
        return sum(trial.seconds for trial in self.trials) / slots if slots else None

    @property
    def speedup(self) -> Interval | None:
        """How many times as fast all trials were done as one after the other on one such device; None where unknown.

        The steps' ratio times the share of places taken. Start-up and evaluation are taken to be held back by their
        neighbours as the steps are; tests/benchmarks/test_sweep.py compares that with sweeps one after the other.
        """
        share = self.occupancy
        if self.colocation is None or share is None:
            return None
        return self.colocation.over_alone.times(share)
