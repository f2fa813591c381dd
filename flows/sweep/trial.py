"""One trial of a sweep: an ordinary training with a recipe of its own, in a thread of the flow's process.

It may be ended before its time: by the pruner, or with the sweep. Whatever becomes of it, the others go on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prefect import get_run_logger
from prefect.client.schemas.objects import State

from paceline.conf.config import Config
from paceline.conf.environment import Environment
from paceline.conf.load import ConfigError, make_config
from paceline.flows.checks import preflight
from paceline.flows.checks.measured_plan import train_job
from paceline.flows.checks.preflight import PreflightResult
from paceline.flows.lifecycle.mlflow_run import nested_run
from paceline.flows.lifecycle.signals import is_interruption
from paceline.flows.run.outcome import run_comparison_facts
from paceline.flows.study.metrics import arm_run, training_metrics
from paceline.tasks import deadline
from paceline.tasks.errors import InputError, PacelineError, RankError, StoppedError, one_line
from paceline.tasks.evaluate.prefect_tasks import evaluate
from paceline.tasks.progress import hidden_bars
from paceline.tasks.records import EvaluateResult, Plan, PreparedSet, TrainResult
from paceline.tasks.speedup.study.records import StudyArm
from paceline.tasks.sweep.concurrency import TrialConcurrency
from paceline.tasks.sweep.optuna_study import TrialStore
from paceline.tasks.sweep.records import Proposal, Status, Trial
from paceline.tasks.sweep.space import Parameter
from paceline.tasks.track import run as tracking
from paceline.tasks.track.run import RunHandle
from paceline.tasks.train.launch.coordinator import TrainJob
from paceline.tasks.train.launch.progress_file import scores_so_far
from paceline.tasks.train.prefect_tasks import train_trial


@dataclass(frozen=True)
class SweepContext:
    """What the trials of a sweep share."""

    config: Config
    parameters: tuple[Parameter, ...]
    checked: PreflightResult
    room: TrialConcurrency
    address: str
    environment: Environment
    parent: RunHandle
    prepared: PreparedSet
    layers: dict[str, Any]
    """Precision, memory format and threads of all trials, where they were left to `auto`, as measured."""
    proposer: TrialStore
    stopped: threading.Event
    """Set when the sweep is to end before its time."""

    def settled(self, proposal: Proposal) -> tuple[Config, Plan]:
        """A trial's configuration, and how it is executed on its share of the devices.

        Raises:
            ConfigError: these values do not go together.
            InputError: they do not go with the hardware or the data.
        """
        config = make_config(self.config, list(self.overrides(proposal)))
        config = config.model_copy(update={"name": f"trial {proposal.number}"})
        plan = preflight.plan_like(config, self.checked, self.room.share)
        return config, plan.model_copy(update=self.layers | {"reasons": {}})  # the sweep has logged them for all trials

    def overrides(self, proposal: Proposal) -> tuple[str, ...]:
        """`key=value` for each of its settings."""
        return tuple(found.override(proposal.values[found.setting]) for found in self.parameters)


class _Watch:
    """Looks at a training while it goes on, and says when it is to end."""

    def __init__(self, work: SweepContext, number: int, directory: Path) -> None:
        self._work = work
        self._number = number
        self._directory = directory
        self._num_reported = work.proposer.num_reported(number)
        self.scores: tuple[float, ...] = ()

    def why_end(self) -> str | None:
        """Why the training is to end; None while it is not."""
        if self._work.stopped.is_set():
            return f"interrupted; go on with: paceline sweep --resume {self._work.parent.run_id}"
        return self.take(scores_so_far(self._directory))

    def take(self, scores: tuple[float, ...]) -> str | None:
        """Report the scores that are new; why the training is to end, by the pruner's judgement of them."""
        self.scores = max(self.scores, scores, key=len)
        for score in self.scores[self._num_reported :]:
            self._num_reported += 1
            if self._work.proposer.report(self._number, self._num_reported, score):
                return f"pruned after epoch {self._num_reported}, at {score:.4f}: others were better by then"
        return None


def run_trial(work: SweepContext, proposal: Proposal) -> Trial | None:
    """Run a trial to its end, and have the proposer know of it; None if the sweep was ended first.

    A failure is the trial's alone, and is reported as such.
    """
    begun = _Begun(proposal)
    try:
        config, plan = work.settled(proposal)
    except (ConfigError, InputError) as error:
        return _failed(work, begun, error, final=True)
    try:
        with nested_run(work.parent, config, config.name, "trial", proposal.run_id) as handle:
            begun.run_id = handle.run_id
            work.proposer.begun(proposal.number, handle.run_id)
            trial = _train(work, begun, config, plan, handle)
    except StoppedError as stopped:
        if work.stopped.is_set():
            return None
        trial = begun.ended("pruned", str(stopped))
    except Exception as error:  # noqa: BLE001 - a store's or a disk's too: the others may get through
        if work.stopped.is_set() or is_interruption(error):
            return None
        if not isinstance(error, PacelineError):
            get_run_logger().warning("Trial %d", proposal.number, exc_info=error)
        return _failed(work, begun, error, final=isinstance(error, RankError) and error.final)
    work.proposer.ended(trial)
    return trial


class _Begun:
    """What is known of a trial that runs."""

    def __init__(self, proposal: Proposal) -> None:
        self.proposal = proposal
        self.run_id = proposal.run_id
        self.scores: Callable[[], tuple[float, ...]] = tuple
        self.started = time.time()
        self._started = time.monotonic()

    def ended(self, status: Status, error: str | None = None) -> Trial:
        """Its record, if it ends now."""
        scores = self.scores()
        return Trial(
            number=self.proposal.number,
            values=self.proposal.values,
            run_id=self.run_id,
            status=status,
            score=scores[-1] if scores and status != "failed" else None,
            scores=scores,
            seconds=time.monotonic() - self._started,
            started=self.started,
            error=error,
        )


def _failed(work: SweepContext, begun: _Begun, error: Exception, *, final: bool) -> Trial:
    """Remember that a trial has failed; a `final` one lies in its own settings, and is not tried again by a resume."""
    trial = begun.ended("failed", one_line(error))
    work.proposer.ended(trial, final=final)
    return trial


def _train(work: SweepContext, begun: _Begun, config: Config, plan: Plan, handle: RunHandle) -> Trial:
    """Train, evaluate and log.

    Raises:
        StoppedError: It was pruned, or the sweep has ended.
        PacelineError: It failed.
    """
    resume = begun.proposal.run_id is not None
    if not resume:
        tracking.log_dataset(handle, work.prepared, config.data.source)
    checked = replace(work.checked, plan=plan)
    job = train_job(config, checked, work.prepared, handle.run_id, work.environment, resume=resume)
    watch = _Watch(work, begun.proposal.number, job.directory)
    begun.scores = lambda: watch.scores
    with deadline.stoppable(watch.why_end), hidden_bars():
        trained = train_trial.with_options(task_run_name=config.name)(job, work.address)
    if isinstance(trained, State):
        if not work.stopped.is_set():
            _log_pruned(handle, begun.ended("pruned"), trained.message or "")
        raise StoppedError(trained.message or "")
    watch.take(trained.validation_scores)  # too late for the pruner, but it judges others by them
    with_name = evaluate.with_options(task_run_name=f"evaluate {config.name}")
    evaluated = with_name(trained, work.prepared, config.limits.evaluate_seconds)
    trial = begun.ended("done").model_copy(
        update={
            "test_score": evaluated.score,
            "restarts": len(trained.restarts),
            "samples_per_second": trained.samples_per_second,
        }
    )
    _log(work, handle, trial, job, trained, evaluated)
    return trial


def _log_pruned(handle: RunHandle, trial: Trial, why: str) -> None:
    tracking.log_facts(handle, _metrics(trial), _tags(trial) | {"paceline.pruned": why})


def _log(
    work: SweepContext, handle: RunHandle, trial: Trial, job: TrainJob, trained: TrainResult, evaluated: EvaluateResult
) -> None:
    arm = StudyArm(name=job.config.name, overrides=work.overrides(_of(trial)), group="", is_baseline=False)
    metrics = training_metrics(arm_run(arm, trained, evaluated), trained, evaluated)
    tags = _tags(trial) | {"paceline.dataset": work.prepared.fingerprint}
    tracking.log_facts(handle, metrics | _metrics(trial), tags)
    facts = run_comparison_facts(job.config, work.prepared, job.plan, job.pretrained)
    tracking.log_document(handle, tracking.FACTS_ARTIFACT, facts)


def _of(trial: Trial) -> Proposal:
    return Proposal(number=trial.number, values=trial.values)


def _metrics(trial: Trial) -> dict[str, float | None]:
    return {
        "sweep/score": trial.score,
        "sweep/seconds": trial.seconds,
        "sweep/num_epochs": len(trial.scores),
        "recovery/num_restarts": trial.restarts,
    }


def _tags(trial: Trial) -> dict[str, str]:
    return {"paceline.trial": str(trial.number)}
