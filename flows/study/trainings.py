"""Trainings of a study: every arm several times in a balanced order, each in a run nested in the study's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from prefect import get_run_logger

from paceline.conf.config import Config
from paceline.conf.data import Data
from paceline.conf.environment import Environment
from paceline.conf.load import make_config
from paceline.flows.checks import preflight
from paceline.flows.checks.measured_plan import measure_plan, train_job
from paceline.flows.checks.origin import check_origin
from paceline.flows.checks.preflight import PreflightResult
from paceline.flows.lifecycle.mlflow_run import nested_run, open_run
from paceline.flows.lifecycle.outage import with_retries
from paceline.flows.lifecycle.signals import is_interruption
from paceline.flows.run.outcome import run_comparison_facts
from paceline.flows.study.metrics import arm_run, training_metrics
from paceline.flows.study.record import log_arm, log_diagnosis
from paceline.flows.study.request import StudyRequest
from paceline.tasks.cluster.kinds import open_cluster
from paceline.tasks.cluster.resources import demand_of
from paceline.tasks.data.prefect_tasks import prepare
from paceline.tasks.errors import InputError, PacelineError
from paceline.tasks.evaluate.prefect_tasks import evaluate
from paceline.tasks.fingerprint import workload_fingerprint
from paceline.tasks.names import Tag
from paceline.tasks.records.data import PreparedSet
from paceline.tasks.speedup.comparability import differences
from paceline.tasks.speedup.prefect_tasks import account
from paceline.tasks.speedup.study.design import balanced_order
from paceline.tasks.speedup.study.ledger import Ledger
from paceline.tasks.speedup.study.records import ArmRun, StudyArm
from paceline.tasks.track import run as tracking
from paceline.tasks.track.run import RunHandle
from paceline.tasks.train.prefect_tasks import train

MAX_SHARE_OF_REPEATS = 0.25  # contaminated trainings are repeated at once, until the study has grown by this share


@dataclass(frozen=True)
class StudyContext:
    """State that the trainings of a study share."""

    request: StudyRequest
    environment: Environment
    address: str
    parent: RunHandle
    prepared: dict[Data, PreparedSet]
    ledger: Ledger


@dataclass(frozen=True)
class PlannedArm:
    """A checked arm."""

    arm: StudyArm
    config: Config
    checked: PreflightResult
    train_fn: Callable[[StudyContext, PlannedArm, Config, RunHandle], ArmRun]
    """Trains once and logs to the run; `run_all` fills in repeat, position, facts and run id of the record."""


@contextmanager
def open_study(
    request: StudyRequest, arms: list[PlannedArm], environment: Environment, resume: str | None
) -> Iterator[tuple[StudyContext, list[PlannedArm]]]:
    """Open the cluster, the data and the run of a study, whose workload the first of its checked arms names."""
    on_gpus = any(arm.checked.plan.accelerator == "gpu" for arm in arms)
    demand = demand_of([arm.config.execution for arm in arms], "gpu" if on_gpus else "cpu")
    check_origin(request.config.cluster, environment)  # the arms are checked, but may name another cluster
    with open_cluster(request.config.cluster, demand, environment) as address:
        arms = [replace(arm, checked=preflight.confirm_on_cluster(arm.config, arm.checked, address)) for arm in arms]
        limits = request.config.limits
        stage = with_retries(prepare, limits)
        prepared = {
            data: stage(stored, str(environment.root), address, limits.prepare_seconds)
            for data, stored in {arm.config.data: arm.config.stored_data for arm in reversed(arms)}.items()
        }
        data = prepared[arms[0].config.data].fingerprint
        workload = workload_fingerprint(request.config.workload, data, arms[0].checked.weights)
        if resume is not None:
            arms = [_measure_arm(arm, prepared, environment, resume, address) for arm in arms]
            _check_conditions(resume, _ledger(environment, resume), request, arms, prepared)
        experiment_id = arms[0].checked.experiment_id
        with open_run(request.kind, request.config, environment, experiment_id, workload, resume, request) as parent:
            if resume is None:
                arms = [_measure_arm(arm, prepared, environment, parent.run_id, address) for arm in arms]
            ledger = _ledger(environment, parent.run_id)
            yield StudyContext(request, environment, address, parent, prepared, ledger), arms


def _measure_arm(
    arm: PlannedArm, prepared: dict[Data, PreparedSet], environment: Environment, run_id: str, address: str
) -> PlannedArm:
    data = prepared[arm.config.data]
    return replace(arm, checked=measure_plan(arm.config, arm.checked, data, run_id, environment, address))


def _ledger(environment: Environment, run_id: str) -> Ledger:
    return Ledger(environment.root / "runs" / run_id / "arms.jsonl")


def _check_conditions(
    resume: str, ledger: Ledger, request: StudyRequest, arms: list[PlannedArm], prepared: dict[Data, PreparedSet]
) -> None:
    """Refuse to combine trainings of one arm on changed data, settings, versions or devices."""
    by_name = {arm.arm.name: arm for arm in arms}
    for run in ledger.runs():
        arm = by_name.get(run.arm)
        if run.status != "done" or arm is None:
            continue
        changed = differences(run.facts, _facts(request, arm, prepared[arm.config.data], run.repeat))
        if changed:
            raise InputError(
                f"--resume {resume}: since {run.arm}, repeat {run.repeat + 1}, was trained, {'; '.join(changed)}; "
                "trainings from before and after the change are not comparable: start a new study"
            )


def _facts(request: StudyRequest, arm: PlannedArm, prepared: PreparedSet, repeat: int) -> dict[str, str]:
    config = arm.config.model_copy(update={"seed": request.config.seed + repeat})
    return run_comparison_facts(config, prepared, arm.checked.plan, arm.checked.pretrained)


def run_all(work: StudyContext, arms: list[PlannedArm]) -> None:
    """Run the trainings that are missing in the ledger."""
    by_name = {arm.arm.name: arm for arm in arms}
    order = balanced_order(list(by_name), work.request.repeats, work.request.config.seed)
    total = len(arms) * work.request.repeats
    spare = int(MAX_SHARE_OF_REPEATS * total)
    for repeat, names in enumerate(order):
        for name in names:
            if work.ledger.has(name, repeat):
                continue
            run = _run_one(work, by_name[name], repeat)
            if run.contaminated and spare:
                spare -= 1
                get_run_logger().warning("%s, repeat %d: %s; repeating it", name, repeat, "; ".join(run.contamination))
                run = _supersede(work.parent, run, _run_one(work, by_name[name], repeat))
            work.ledger.add(run)
            get_run_logger().info("%d of %d trainings: %s", work.ledger.num_runs(), total, _line(run))


def confirm(work: StudyContext, arms: list[PlannedArm], winners: Sequence[StudyArm]) -> None:
    """Train the winners among several arms and their baselines again, with further seeds, as often as before."""
    by_name = {arm.arm.name: arm for arm in arms}
    for winner in winners:
        base = next(arm.arm for arm in arms if arm.arm.is_baseline and arm.arm.group == winner.group)
        get_run_logger().info("%s is the fastest of several arms so far: measuring it again", winner.name)
        for number in range(work.request.repeats):
            repeat = work.request.repeats + number
            for name in (base.name, winner.name) if number % 2 else (winner.name, base.name):
                if work.ledger.has(name, repeat):
                    continue
                run = _run_one(work, by_name[name], repeat).model_copy(update={"is_fresh": True})
                work.ledger.add(run)
                get_run_logger().info("again: %s", _line(run))


def _supersede(parent: RunHandle, first: ArmRun, second: ArmRun) -> ArmRun:
    """Choose the repetition unless it failed; tag the MLflow run of the other training."""
    chosen, superseded = (second, first) if second.status == "done" else (first, second)
    if superseded.run_id and chosen.run_id:
        handle = parent.model_copy(update={"run_id": superseded.run_id})
        tracking.log_facts(handle, {}, {Tag.SUPERSEDED_BY: chosen.run_id})
    return chosen


def _line(run: ArmRun) -> str:
    if run.status == "failed":
        return f"{run.arm} failed: {run.error}"
    rate = f"{run.samples_per_second:,.0f} samples/s" if run.samples_per_second else "no steady state"
    return f"{run.arm}: {rate}" + (", contaminated" if run.contaminated else "")


def _run_one(work: StudyContext, arm: PlannedArm, repeat: int) -> ArmRun:
    """Run one arm once; a failure ends this training alone."""
    config = arm.config.model_copy(
        update={"seed": work.request.config.seed + repeat, "name": f"{arm.arm.name} #{repeat + 1}"}
    )
    if repeat > 0 and config.speedup.diagnose:  # one diagnosis is enough
        config = make_config(config, ["speedup.baseline=none", "speedup.diagnose=false"])
    prepared = work.prepared[config.data]
    facts = _facts(work.request, arm, prepared, repeat)
    identity = {"repeat": repeat, "position": work.ledger.num_runs(), "facts": facts}
    run_id = None
    try:
        with nested_run(work.parent, config, config.name) as handle:
            run_id = handle.run_id
            tracking.log_dataset(handle, prepared, config.data.source)
            run = arm.train_fn(work, arm, config, handle).model_copy(update=identity | {"run_id": run_id})
            log_arm(handle, arm.arm, run)
            return run
    except PacelineError as error:
        if is_interruption(error):
            raise
        failed = {"status": "failed", "error": str(error), "world_size": config.execution.world_size}
        return ArmRun.model_validate({"arm": arm.arm.name, "run_id": run_id} | identity | failed)


def train_arm(work: StudyContext, arm: PlannedArm, config: Config, handle: RunHandle) -> ArmRun:
    """Train in fresh ranks, and evaluate."""
    prepared = work.prepared[config.data]
    # A shared compile cache would let the first repeat compile for all others.
    job = train_job(config, arm.checked, prepared, handle.run_id, work.environment, cold_compile=True)
    trained = train(job, work.address)
    evaluated = evaluate(trained, prepared, config.limits.evaluate_seconds)
    run = arm_run(arm.arm, trained, evaluated)
    tracking.log_facts(handle, training_metrics(run, trained, evaluated), {})
    if trained.probe is None:
        return run
    speedup = account(trained, arm.checked.hardware.num_cores)
    log_diagnosis(handle, speedup)
    return run.model_copy(update={"cause": speedup.cause, "shares": speedup.shares})
