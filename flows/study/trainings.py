"""Trainings of a study: every arm several times in a balanced order, each in a run nested in the study's."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from prefect import get_run_logger
from pydantic import BaseModel, ConfigDict, Field

from paceline.conf.config import Config
from paceline.conf.data import Data
from paceline.conf.environment import Environment
from paceline.conf.lightning import Objective
from paceline.conf.load import PlanArm, make_config
from paceline.conf.section import Text
from paceline.flows.checks import preflight
from paceline.flows.checks.measured_plan import measure_plan, train_job
from paceline.flows.checks.origin import check_origin
from paceline.flows.checks.space import require_space_for_rest
from paceline.flows.lifecycle.mlflow_run import nested_run, open_run
from paceline.flows.lifecycle.outage import with_retries
from paceline.flows.lifecycle.signals import is_interruption
from paceline.flows.run.outcome import run_comparison_facts, stage_metrics
from paceline.tasks.cluster.client import demand_of
from paceline.tasks.cluster.kinds import open_cluster
from paceline.tasks.data.prefect_tasks import prepare
from paceline.tasks.errors import InputError, PacelineError
from paceline.tasks.evaluate.prefect_tasks import evaluate
from paceline.tasks.fingerprint import lightning_fingerprint, workload_fingerprint
from paceline.tasks.names import Artifact, Metric, Tag
from paceline.tasks.records.data import PreparedSet
from paceline.tasks.records.training import EvaluateResult, Trained, TrainResult
from paceline.tasks.speedup.comparability import differences
from paceline.tasks.speedup.limit_share import limit_share
from paceline.tasks.speedup.prefect_tasks import account
from paceline.tasks.speedup.steady_state import steady_rate
from paceline.tasks.speedup.study.design import balanced_order
from paceline.tasks.speedup.study.ledger import Ledger
from paceline.tasks.speedup.study.records import ArmRun, StudyArm
from paceline.tasks.track import run as tracking
from paceline.tasks.track.run import RunHandle
from paceline.tasks.train.prefect_tasks import train

MAX_SHARE_OF_REPEATS = 0.25  # contaminated trainings are repeated at once, until the study has grown by this share
OF_TRAINING = (
    *("world_size", "num_epochs", "startup_seconds", "time_budget", "data_wait_fraction", "communication_fraction"),
    *("idle_fraction", "peak_memory_bytes", "energy_joules", "compile"),
)


class StudyRequest(BaseModel):
    """Parameters of a study."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    preset: Text
    """Name or path of the preset, for people."""
    config: Config
    """Settings that all arms share."""
    axes: dict[str, list[Text]] = {}
    """Setting -> its values, the baseline's first."""
    arms: dict[str, PlanArm] = {}
    """Instead of axes: from scratch, fine-tuned and features, which are compared by the time to the same score."""
    same_work: list[Text] = []
    """Axes of own Lightning code whose values change how the work is done, and not what is learned."""
    objective: Objective | None = None
    """Metric of own Lightning code for the parity of the arms; None for its validation loss."""
    ladder: bool = False
    """Add one factor at a time instead of the full grid."""
    # The bounds are for Prefect's form; `check_study` and the command give better messages.
    repeats: int = Field(default=3, json_schema_extra={"minimum": 1})
    """Trainings of each arm."""
    target: float | None = Field(default=None, json_schema_extra={"exclusiveMinimum": 0, "maximum": 1})
    """Validation score (accuracy, mean IoU or SSIM) to which the time is measured; None for the lowest final score of a
    baseline run. With `arms`, None is the final accuracy of training from scratch in the same repeat."""
    gpu: Text = "L4"
    """With `arms`: GPU whose data sheet bounds unmeasured values."""

    @property
    def kind(self) -> Literal["study", "no-gpu"]:
        """Role of its run in MLflow."""
        return "no-gpu" if self.arms else "study"

    @property
    def is_own(self) -> bool:
        """Whether it trains the user's own Lightning code."""
        return bool(self.config.lightning.settings)


@dataclass(frozen=True)
class StudyContext:
    """State that the trainings of a study share."""

    request: StudyRequest
    environment: Environment
    address: str
    parent: RunHandle
    prepared: dict[Data, PreparedSet]  # empty for own Lightning code
    ledger: Ledger


@dataclass(frozen=True)
class PlannedArm:
    """A checked arm."""

    arm: StudyArm
    config: Config
    checked: preflight.PreflightResult
    train_fn: Callable[[StudyContext, "PlannedArm", Config, RunHandle], ArmRun]
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
        stored = {} if request.is_own else {arm.config.data: arm.config.stored_data for arm in reversed(arms)}
        prepared = {
            data: stage(settings, str(environment.root), address, limits.prepare_seconds, resume is not None)
            for data, settings in stored.items()
        }
        workload = lightning_fingerprint(request.config.lightning)
        if not request.is_own:
            data = prepared[arms[0].config.data].fingerprint
            workload = workload_fingerprint(request.config.workload, data, arms[0].checked.weights)

        def measure(run_id: str) -> list[PlannedArm]:
            if request.is_own:  # it has no settings that are `auto` and can be timed
                return arms
            shared = run_id, environment, address
            plans = [measure_plan(arm.config, arm.checked, prepared[arm.config.data], *shared) for arm in arms]
            return [replace(arm, checked=checked) for arm, checked in zip(arms, plans, strict=True)]

        if resume is not None:
            arms = measure(resume)
            _check_conditions(resume, _ledger(environment, resume), request, arms, prepared)
        experiment_id = arms[0].checked.experiment_id
        with open_run(request.kind, request.config, environment, experiment_id, workload, resume, request) as parent:
            if resume is None:
                arms = measure(parent.run_id)
            ledger = _ledger(environment, parent.run_id)
            yield StudyContext(request, environment, address, parent, prepared, ledger), arms


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
        if changed := differences(run.facts, _facts(request, arm, prepared.get(arm.config.data), run.repeat)):
            raise InputError(
                f"--resume {resume}: since {run.arm}, repeat {run.repeat + 1}, was trained, {'; '.join(changed)}; "
                "trainings from before and after the change are not comparable: start a new study"
            )


def _facts(request: StudyRequest, arm: PlannedArm, prepared: PreparedSet | None, repeat: int) -> dict[str, str]:
    config = arm.config.with_seed(request.config.seed + repeat)
    return run_comparison_facts(config, prepared, arm.checked.plan, arm.checked.pretrained, request.same_work)


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
            _require_space(work, by_name)
            get_run_logger().info("%d of %d trainings: %s", len(work.ledger.runs()), total, _line(run))


def _require_space(work: StudyContext, names: Iterable[str]) -> None:
    """Check the space for the trainings of these arms that are left. Raises RunError: it is missing."""
    repeats, rest = work.request.repeats, []
    for name in names:
        runs = [run for run in work.ledger.runs() if run.arm == name and run.repeat < repeats]
        rest.append(([run.run_id for run in runs if run.status == "done"], repeats - len(runs)))
    require_space_for_rest(work.request.config, work.environment, rest)


def confirm(work: StudyContext, arms: list[PlannedArm], winners: Sequence[StudyArm]) -> None:
    """Train the winners among several arms and their baselines again, with further seeds, as often as before."""
    by_name = {arm.arm.name: arm for arm in arms}
    for winner in winners:
        base = next(arm.arm for arm in arms if arm.arm.is_baseline and arm.arm.group == winner.group)
        get_run_logger().info("%s is the fastest of several arms so far: measuring it again", winner.name)
        for number in range(work.request.repeats):
            repeat = work.request.repeats + number
            for name in (base.name, winner.name) if number % 2 else (winner.name, base.name):
                if not work.ledger.has(name, repeat):
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
    name = f"{arm.arm.name} #{repeat + 1}"
    config = arm.config.with_seed(work.request.config.seed + repeat).model_copy(update={"name": name})
    if repeat > 0 and config.speedup.diagnose:  # one diagnosis is enough
        config = make_config(config, ["speedup.baseline=none", "speedup.diagnose=false"])
    prepared = work.prepared.get(config.data)
    facts = _facts(work.request, arm, prepared, repeat)
    identity = {"repeat": repeat, "position": len(work.ledger.runs()), "facts": facts}
    run_id = None
    try:
        with nested_run(work.parent, config, config.name) as handle:
            run_id = handle.run_id
            if prepared is not None:
                tracking.log_dataset(handle, prepared, config.data.source)
            run = arm.train_fn(work, arm, config, handle).model_copy(update=identity | {"run_id": run_id})
            tags = {
                Tag.ARM: arm.arm.name,
                Tag.GROUP: arm.arm.group,
                Tag.IS_BASELINE: str(arm.arm.is_baseline),
                Tag.REPEAT: str(run.repeat),
                Tag.CONTAMINATED: str(run.contaminated),
                Tag.CONTAMINATION: "; ".join(run.contamination),
            }
            if prepared is not None:
                tags[Tag.DATASET] = prepared.fingerprint
            tracking.set_tags(handle, tags)
            tracking.log_document(handle, Artifact.FACTS, run.facts)
            return run
    except PacelineError as error:
        is_refused = isinstance(error, InputError) and work.request.is_own and not work.ledger.runs()
        if is_interruption(error) or is_refused:  # a rank refuses own code that cannot be trained
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
    run = arm_run(arm.arm, trained, **quality_of(trained, evaluated))
    tracking.log_facts(handle, stage_metrics(trained, evaluated) | time_metrics(run), {})
    return add_cause(run, arm, trained, handle)


def add_cause(run: ArmRun, arm: PlannedArm, trained: Trained, handle: RunHandle) -> ArmRun:
    """Add what limits the step, and log it; nothing for a training without a probe."""
    if trained.probe is None:
        return run
    speedup = account(trained, arm.checked.hardware.num_cores)  # of it, the study uses what limits the step
    shares: dict[str, float | None] = {Metric.step_share(name): share[0] for name, share in speedup.shares.items()}
    tracking.log_facts(handle, shares, {Tag.CAUSE: speedup.cause or "", Tag.VERDICT: speedup.verdict})
    return run.model_copy(update={"cause": speedup.cause, "shares": speedup.shares})


def arm_run(arm: StudyArm, trained: Trained, **quality: Any) -> ArmRun:
    """Collect the metrics of a training that a study compares; its quality is given."""
    ends = trained.epoch_ends
    lengths = [later - sooner for sooner, later in itertools.pairwise(ends)]
    startup = trained.startup_seconds
    restarted = tuple(f"it was restarted: {restart.cause}" for restart in trained.restarts)
    facts = {
        "arm": arm.name,
        "repeat": 0,
        "position": 0,
        **{name: getattr(trained, name) for name in OF_TRAINING},
        "samples_per_second": steady_rate(trained),
        **limit_share(trained).model_dump(include={"of_limit", "flops_per_second", "mfu"}),
        "epoch_seconds": sorted(lengths)[len(lengths) // 2] if lengths else None,
        "first_epoch_seconds": ends[0] - startup if ends and startup is not None else None,
        "end_to_end_seconds": ends[-1] if ends else None,
        "contaminated": bool(restarted) or (trained.validity.contaminated if trained.validity else None),
        "contamination": restarted + (trained.validity.reasons if trained.validity else ()),
    }
    return ArmRun.model_validate(facts | quality)


def quality_of(trained: TrainResult, evaluated: EvaluateResult) -> dict[str, Any]:
    """The quality of a training of a preset, and how fast it predicts."""
    ends = trained.epoch_ends
    return {
        "score_name": evaluated.score_name,
        "score": evaluated.score,
        "num_test": evaluated.num_samples,
        "predictions": trained.predictions,
        "prediction_samples_per_second": evaluated.samples_per_second,
        "validation": tuple(zip(ends, trained.validation_scores[-len(ends) :], strict=False)),
    }


def time_metrics(run: ArmRun) -> dict[str, float | None]:
    """MLflow metrics that trainings inside a study or a sweep have in addition."""
    return {Metric.END_TO_END_SECONDS: run.end_to_end_seconds, Metric.EPOCH_SECONDS: run.epoch_seconds}
