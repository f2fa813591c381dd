"""Proposals and pruning of trials by Optuna's samplers and pruners.

A journal in the run's folder has one line for each proposal, report and end, so that a sweep resumes after any crash.
The run's owner alone writes it: see `paceline.tasks.train.launch.run_lock`.
"""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from paceline.tasks.records.record import Record
from paceline.tasks.sweep.records import Proposal, Pruner, Sampler, Status, Trial
from paceline.tasks.sweep.space import Parameter

STUDY = "sweep"  # Optuna's name of it, always the same: Hyperband sorts trials into brackets by name and number
RUN_ID, ENDED, AGAIN, FINAL = "run_id", "trial", "again", "final"  # attributes of a trial in the journal
REDUCTION = 3  # of `asha` and `hyperband`: at 1, 3, 9 ... epochs the best third continues.
STATES: dict[Status, TrialState] = {"done": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}

optuna.logging.disable_default_handler()
optuna.logging.set_verbosity(optuna.logging.ERROR)


class Search(Record):
    """Parameters and strategy of a search."""

    parameters: tuple[Parameter, ...]
    sampler: Sampler
    pruner: Pruner
    num_trials: int  # to be proposed; those that are tried again not counted
    num_epochs: int  # of a trial that is not pruned; the most of them
    seed: int
    goal: Literal["minimize", "maximize"] = "maximize"  # of the score


class TrialStore:
    """Proposes trials, takes their scores, and remembers all of it. For use from several threads."""

    def __init__(self, journal: Path, search: Search) -> None:
        self._lock = threading.Lock()
        self._distributions = {parameter.setting: _distribution(parameter) for parameter in search.parameters}
        journal.parent.mkdir(parents=True, exist_ok=True)
        _repair_journal(journal)
        storage = JournalStorage(JournalFileBackend(str(journal)))
        exists = STUDY in {study.study_name for study in storage.get_all_studies()}
        num_before = len(storage.get_all_trials(storage.get_study_id_from_name(STUDY))) if exists else 0
        # A sampler restarts its random numbers in each process: the same seed would propose the same again.
        sampler, pruner = _sampler(search, search.seed + num_before), _pruner(search)
        self._study = optuna.create_study(
            storage=storage,
            sampler=sampler,
            pruner=pruner,
            study_name=STUDY,
            direction=search.goal,
            load_if_exists=True,
        )
        self._left = search.num_trials - sum(AGAIN not in trial.user_attrs for trial in self._all())

    def resumable_trials(self) -> list[Proposal]:
        """Running trials of an interrupted sweep, and failed ones that may be retried, under other numbers."""
        with self._lock:
            trials = self._all()
            running = [trial for trial in trials if trial.state == TrialState.RUNNING]
            retried = {trial.user_attrs.get(AGAIN) for trial in trials}
            for trial in trials:
                if trial.state == TrialState.FAIL and not trial.user_attrs.get(FINAL) and trial.number not in retried:
                    self._study.enqueue_trial(trial.params, user_attrs={AGAIN: trial.number})
            num_waiting = sum(trial.state == TrialState.WAITING for trial in self._all())
            retries = [self._ask() for _ in range(num_waiting)]
            resumed = [
                Proposal(number=trial.number, values=self._values(trial), run_id=trial.user_attrs.get(RUN_ID))
                for trial in running
            ]
            return resumed + retries

    def _values(self, known: FrozenTrial) -> dict[str, Any]:
        """Values of a running trial; those missing from the journal are drawn now."""
        if known.params.keys() >= self._distributions.keys():
            return known.params
        trial = self._trial(known.number)
        for name, distribution in self._distributions.items():
            trial._suggest(name, distribution)  # as `Study.ask` does
        return trial.params

    def propose(self) -> Proposal | None:
        """Propose a new trial; None when all trials have been proposed."""
        with self._lock:
            if self._left <= 0:
                return None
            self._left -= 1
            return self._ask()

    def mark_started(self, number: int, run_id: str) -> None:
        """Store the MLflow run of a trial, with which it can resume."""
        with self._lock:
            self._trial(number).set_user_attr(RUN_ID, run_id)

    def report(self, number: int, epoch: int, score: float) -> bool:
        """Take a trial's score after an epoch, counted from 1; whether the trial is to be ended."""
        with self._lock:
            trial = self._trial(number)
            trial.report(score, epoch)
            return bool(trial.should_prune())

    def count_reported(self, number: int) -> int:
        """Number of epochs with known scores of a resumed trial."""
        with self._lock:
            return max(self._all()[number].intermediate_values, default=0)

    def mark_ended(self, trial: Trial, *, final: bool = True) -> None:
        """Store the result of a trial."""
        with self._lock:
            stored = self._trial(trial.number)
            stored.set_user_attr(ENDED, trial.model_dump(mode="json"))
            stored.set_user_attr(FINAL, final)
            value = trial.score if trial.status == "done" else None
            self._study.tell(trial.number, value, STATES[trial.status])

    def trials(self) -> tuple[Trial, ...]:
        """Those that have ended, those of former processes included; of one that was tried again the last."""
        with self._lock:
            finished = [trial for trial in self._all() if ENDED in trial.user_attrs]
        retried = {trial.user_attrs.get(AGAIN) for trial in finished}
        ended = (trial.user_attrs[ENDED] for trial in finished if trial.number not in retried)
        return tuple(Trial.model_validate(stored) for stored in ended)

    def _all(self) -> Sequence[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _ask(self) -> Proposal:
        trial = self._study.ask(self._distributions)
        return Proposal(number=trial.number, values=trial.params)

    def _trial(self, number: int) -> optuna.trial.Trial:
        return optuna.trial.Trial(self._study, self._all()[number]._trial_id)


class _Grid(optuna.samplers.GridSampler):
    """A grid whose end is known beforehand: Optuna's stops the loop of `optimize`, and raises where there is none."""

    def after_trial(self, *_: object) -> None:
        """Nothing is to be stopped."""


def _distribution(parameter: Parameter) -> BaseDistribution:
    if parameter.kind == "list":
        return CategoricalDistribution(parameter.choices)
    if parameter.kind == "int":
        return IntDistribution(int(parameter.low), int(parameter.high), step=parameter.step)
    return FloatDistribution(parameter.low, parameter.high, log=parameter.kind == "log")


def _sampler(search: Search, seed: int) -> optuna.samplers.BaseSampler:
    if search.sampler == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    if search.sampler == "grid":
        grid = {parameter.setting: parameter.all_values() for parameter in search.parameters}
        return _Grid(grid, seed=search.seed)  # its order is to be the same in each process
    # Trials that run count as bad ones, or those proposed at the same time would be alike.
    return optuna.samplers.TPESampler(seed=seed, constant_liar=True)


def _pruner(search: Search) -> optuna.pruners.BasePruner:
    bounds = {"min_resource": 1, "reduction_factor": REDUCTION}
    match search.pruner:
        case "median":
            return optuna.pruners.MedianPruner()
        case "asha":
            return optuna.pruners.SuccessiveHalvingPruner(**bounds)
        case "hyperband":
            return optuna.pruners.HyperbandPruner(max_resource=search.num_epochs, **bounds)
    return optuna.pruners.NopPruner()


def _repair_journal(journal: Path) -> None:
    """Remove an incomplete last line and stale locks of a process that was killed while writing."""
    for lock in journal.parent.glob(f"{journal.name}.lock*"):
        lock.unlink()
    if journal.exists():
        content = journal.read_bytes()
        end = content.rfind(b"\n") + 1
        if end < len(content):
            journal.write_bytes(content[:end])
