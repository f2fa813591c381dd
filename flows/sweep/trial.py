"""Trials of a sweep: trainings with recipes of their own, in threads of the flow's process."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prefect import get_run_logger
from prefect.client.schemas.objects import State
from pydantic import Field

from paceline.conf.config import Config
from paceline.conf.environment import Environment
from paceline.conf.lightning import Objective
from paceline.conf.load import ConfigError, make_config
from paceline.conf.section import Section, Text
from paceline.flows.checks import preflight
from paceline.flows.checks.lightning import configure
from paceline.flows.checks.measured_plan import train_job
from paceline.flows.lifecycle.mlflow_run import nested_run
from paceline.flows.lifecycle.signals import is_interruption
from paceline.flows.run.metrics import training_metrics as own_metrics
from paceline.flows.run.outcome import run_comparison_facts, stage_metrics
from paceline.flows.study.own_code import own_quality
from paceline.flows.study.trainings import arm_run, quality_of, time_metrics
from paceline.tasks import deadline
from paceline.tasks.errors import InputError, PacelineError, RankError, RunError, StoppedError, one_line
from paceline.tasks.evaluate.prefect_tasks import evaluate
from paceline.tasks.files import load_result, save_result
from paceline.tasks.names import Artifact, Metric, Tag
from paceline.tasks.progress import hidden_bars
from paceline.tasks.records.data import PreparedSet
from paceline.tasks.records.execution import Plan
from paceline.tasks.records.training import ModuleResult
from paceline.tasks.scores import SCORE_OF_TASK, own_name
from paceline.tasks.speedup.study.records import StudyArm
from paceline.tasks.sweep.concurrency import Colocation, TrialConcurrency, colocation_of, judge_colocation
from paceline.tasks.sweep.optuna_study import TrialStore
from paceline.tasks.sweep.records import Proposal, Pruner, Sampler, Status, Trial
from paceline.tasks.sweep.space import Parameter
from paceline.tasks.track import run as tracking
from paceline.tasks.track.run import RunHandle
from paceline.tasks.train.launch.coordinator import scores_so_far
from paceline.tasks.train.lightning import code
from paceline.tasks.train.prefect_tasks import measure, train_trial

COLOCATION_FILE = "colocation.json"  # in the sweep's directory, for a resume


class SweepRequest(Section):
    """Parameters of a sweep."""

    preset: Text
    """Name or path of the preset, for people."""
    config: Config
    """Settings that all trials share."""
    parameters: dict[str, Text]
    """Setting -> its values: log(a,b), lin(a,b), int(a,b[,step]) or [x,y,z]."""
    # The bounds are for Prefect's form; `check_sweep` gives better messages.
    num_trials: int | None = Field(default=None, json_schema_extra={"minimum": 1})
    """Trials; None for 20, or all of a grid."""
    sampler: Sampler = "tpe"
    """What chooses the values: `tpe` learns from the trials before, `random`, or every combination as a `grid`."""
    pruner: Pruner = "none"
    """What ends a trial early whose validation score falls behind: `median` (of the others at that epoch), `asha` (the
    best third continues after 1, 3, 9 ... epochs) or `hyperband` (the same from several first epochs)."""
    objective: Objective | None = None
    """Metric of own Lightning code by which trials are compared; None for the validation score of a preset."""
    at_once: int | None = Field(default=None, json_schema_extra={"minimum": 1})
    """Trials at the same time; None for as many as there are devices for."""

    @property
    def is_own(self) -> bool:
        """Whether it trains the user's own Lightning code."""
        return bool(self.config.lightning.settings)


@dataclass(frozen=True)
class SweepPlan:
    """A checked sweep."""

    request: SweepRequest
    config: Config  # settings that all trials share
    parameters: tuple[Parameter, ...]
    num_trials: int
    checked: preflight.PreflightResult
    room: TrialConcurrency


@dataclass(frozen=True)
class SweepContext(SweepPlan):
    """State that the trials of a sweep share."""

    address: str
    environment: Environment
    parent: RunHandle
    prepared: PreparedSet | None  # None for own Lightning code
    layers: dict[str, Any]  # measured precision, memory format and threads of all trials, if they are `auto`
    proposer: TrialStore
    stopped: threading.Event  # set when the sweep is interrupted

    def configure(self, proposal: Proposal) -> tuple[Config, Plan]:
        """A trial's configuration, and its plan on its share of the devices."""
        run = self.environment.root / "runs" / self.parent.run_id
        (config,) = configure(self.config, [self.overrides(proposal)], run)
        config = config.model_copy(update={"name": f"trial {proposal.number}"})
        plan = preflight.plan_on(config, self.room.share, self.checked.num_train)
        return config, plan.model_copy(update=self.layers | {"reasons": {}})  # logged once by the sweep

    @property
    def score_name(self) -> str:
        """What trials are compared by."""
        objective = self.request.objective
        return own_name(objective) if objective else SCORE_OF_TASK[self.config.model.task]

    def overrides(self, proposal: Proposal) -> tuple[str, ...]:
        """`key=value` for each parameter."""
        return tuple(parameter.override(proposal.values[parameter.setting]) for parameter in self.parameters)


def colocation_on(work: SweepContext, baseline: str) -> tuple[Colocation | None, str]:
    """Measure how trials slow each other down, or read the measurement of a resumed sweep; None with the reason."""
    path, num = work.environment.root / "runs" / work.parent.run_id / COLOCATION_FILE, work.room.num_at_once
    if (stored := load_result(path, Colocation)) is not None:
        if stored.num_devices != num:
            return None, f"{stored.num_devices} trials ran at once before the interruption, now {num} do"
        return stored, ""
    if reason := _why_not(work, baseline):
        return None, reason
    try:
        colocation = _measure(work)
    except (PacelineError, ConfigError) as error:
        if is_interruption(error):
            raise
        return None, f"it could not be measured: {error}"
    if colocation is None:
        return None, "the measurement was too short"
    save_result(path, colocation, [])
    return colocation, ""


def _why_not(work: SweepContext, baseline: str) -> str:
    """Why there is nothing to measure; empty if there is."""
    if work.request.is_own:
        return "with your own Lightning code it is not measured so far"
    if baseline != "probe":
        return f"speedup.baseline={baseline}"
    if work.room.num_at_once == 1:
        return "one trial runs at a time"
    return "each trial has several devices" if work.config.execution.world_size > 1 else ""


def _measure(work: SweepContext) -> Colocation | None:
    devices = f"execution.num_devices={work.room.num_at_once}"
    config = make_config(work.config, [devices, "recipe.batch_scaling=weak", "speedup.baseline=probe"])
    hardware = work.checked.hardware
    plan = preflight.plan_on(config, hardware, work.checked.num_train).model_copy(update=work.layers)
    checked = replace(work.checked, plan=plan)
    measurement = colocation_of(plan, config.recipe.batch_size, hardware.compute_threads)
    job = train_job(config, checked, work.prepared, work.parent.run_id, work.environment, measurement=measurement)
    return judge_colocation(measure(job, work.address).probe)


class _RunningTrial:
    """A trial from its start: watches its training, decides when to stop it, and records how it ended."""

    def __init__(self, work: SweepContext, proposal: Proposal) -> None:
        self.work, self.proposal, self.run_id = work, proposal, proposal.run_id
        self.scores: tuple[float, ...] = ()
        self.started, self._started = time.time(), time.monotonic()
        self._num_reported = 0

    def watch(self, directory: Path) -> Callable[[], str | None]:
        """Watch the training in a directory: a function that says why to stop it, or None to continue."""
        self._num_reported = self.work.proposer.count_reported(self.proposal.number)

        def stop_reason() -> str | None:
            if self.work.stopped.is_set():
                return f"interrupted; resume with: paceline sweep --resume {self.work.parent.run_id}"
            return self.take(scores_so_far(directory))

        return stop_reason

    def take(self, scores: tuple[float, ...]) -> str | None:
        """Report new scores to the pruner; the reason to stop, or None."""
        self.scores = max(self.scores, scores, key=len)
        for score in self.scores[self._num_reported :]:
            self._num_reported += 1
            if self.work.proposer.report(self.proposal.number, self._num_reported, score):
                return f"pruned after epoch {self._num_reported}, at {score:.4f}: others were better by then"
        return None

    def record(self, status: Status, error: str | None = None) -> Trial:
        """The record of the trial if it ends now."""
        return Trial(
            number=self.proposal.number,
            values=self.proposal.values,
            run_id=self.run_id,
            status=status,
            score=self.scores[-1] if self.scores and status != "failed" else None,
            scores=self.scores,
            seconds=time.monotonic() - self._started,
            started=self.started,
            error=error,
        )

    def fail(self, error: Exception, *, final: bool) -> Trial:
        """Store a failure; a resume does not repeat a `final` one, whose cause is the trial's settings."""
        trial = self.record("failed", one_line(error))
        self.work.proposer.mark_ended(trial, final=final)
        return trial


def run_trial(work: SweepContext, proposal: Proposal) -> Trial | None:
    """Run a trial and store its result; None if the sweep was interrupted. A failure ends this trial alone."""
    running = _RunningTrial(work, proposal)
    try:
        config, plan = work.configure(proposal)
    except (ConfigError, PacelineError) as error:
        return running.fail(error, final=not isinstance(error, RunError))  # the child that parses may have been killed
    try:
        with nested_run(work.parent, config, config.name, "trial", proposal.run_id) as handle:
            running.run_id = handle.run_id
            work.proposer.mark_started(proposal.number, handle.run_id)
            trial = _train(running, config, plan, handle)
    except StoppedError as stopped:
        if work.stopped.is_set():
            return None
        trial = running.record("pruned", str(stopped))
    except Exception as error:  # also of the store or the disk: other trials may succeed
        if work.stopped.is_set() or is_interruption(error):
            return None
        if isinstance(error, InputError) and work.request.is_own and not work.proposer.trials():
            raise  # a rank refuses own code that cannot be trained
        if not isinstance(error, PacelineError):
            get_run_logger().warning("Trial %d", proposal.number, exc_info=error)
        return running.fail(error, final=isinstance(error, RankError) and error.final)
    work.proposer.mark_ended(trial)
    return trial


def _train(running: _RunningTrial, config: Config, plan: Plan, handle: RunHandle) -> Trial:
    """Train, evaluate and log; raise StoppedError if the pruner or the end of the sweep stops the trial."""
    work, resume = running.work, running.proposal.run_id is not None
    if work.prepared is not None and not resume:
        tracking.log_dataset(handle, work.prepared, config.data.source)
    checked = replace(work.checked, plan=plan)
    options = {"resume": resume, "may_measure_limit": False}  # next to other trials
    job = train_job(config, checked, work.prepared, handle.run_id, work.environment, **options)
    code.copy_own(config.lightning, job.directory, job.directory.with_name(work.parent.run_id))
    with deadline.stoppable(running.watch(job.directory)), hidden_bars():
        trained = train_trial.with_options(task_run_name=config.name)(job, work.address)
    if isinstance(trained, State):
        if not work.stopped.is_set():
            pruned = running.record("pruned")
            tags = {Tag.TRIAL: str(pruned.number), Tag.PRUNED: trained.message or ""}
            tracking.log_facts(handle, _metrics(pruned), tags)
        raise StoppedError(trained.message or "")
    if isinstance(trained, ModuleResult):
        return _record_own(running, trained, handle)
    assert work.prepared is not None
    running.take(trained.validation_scores)  # the pruner compares later trials with them
    with_name = evaluate.with_options(task_run_name=f"evaluate {config.name}")
    evaluated = with_name(trained, work.prepared, config.limits.evaluate_seconds)
    scores = {"test_score": evaluated.score, "samples_per_second": trained.samples_per_second}
    trial = running.record("done").model_copy(update=scores | {"restarts": len(trained.restarts)})
    arm = StudyArm(name=config.name, overrides=work.overrides(running.proposal), group="", is_baseline=False)
    run = arm_run(arm, trained, **quality_of(trained, evaluated))
    metrics = stage_metrics(trained, evaluated) | time_metrics(run) | _metrics(trial)
    tags = {Tag.TRIAL: str(trial.number), Tag.DATASET: work.prepared.fingerprint}
    tracking.log_facts(handle, metrics, tags)
    facts = run_comparison_facts(config, work.prepared, job.plan, job.pretrained)
    tracking.log_document(handle, Artifact.FACTS, facts)
    return trial


def _record_own(running: _RunningTrial, trained: ModuleResult, handle: RunHandle) -> Trial:
    """Record a training of own Lightning code. Raises InputError or RankError as `own_quality` does."""
    running.take((own_quality(trained, running.work.request.objective)["score"],))
    facts = {"samples_per_second": trained.samples_per_second, "restarts": len(trained.restarts)}
    trial = running.record("done").model_copy(update=facts)
    metrics = own_metrics(trained) | _metrics(trial) | {Metric.SWEEP_NUM_EPOCHS: trained.num_epochs}
    tracking.log_facts(handle, metrics, {Tag.TRIAL: str(trial.number)})
    return trial


def _metrics(trial: Trial) -> dict[str, float | None]:
    return {
        Metric.SWEEP_SCORE: trial.score,
        Metric.SWEEP_SECONDS: trial.seconds,
        Metric.SWEEP_NUM_EPOCHS: len(trial.scores),
        Metric.NUM_RESTARTS: trial.restarts,
    }
