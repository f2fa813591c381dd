"""The study: every arm trained several times in a balanced order, one MLflow run with one nested run per training."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, replace
from typing import Any

from prefect import flow, get_run_logger
from pydantic import BaseModel, ConfigDict, Field

from conf.credentials import Text
from conf.load import apply, validate
from conf.schema import Config, Data
from conf.site import Site, quieten
from flows import preflight, views
from flows.asked import tracked
from flows.facts import run_facts
from flows.interrupt import heard, is_interruption
from flows.overlap import cancel_older
from flows.pipeline import publish
from flows.preflight import Cleared
from flows.study_record import StudyOutcome, log_arm, log_diagnosis, log_study
from flows.tracked import nested
from flows.tried import tried
from tasks.cluster.demand import Demand, demand_of
from tasks.cluster.open import open_cluster
from tasks.data.steps import prepare
from tasks.errors import InputError, PacelineError
from tasks.evaluate.steps import evaluate
from tasks.fingerprint import workload_fingerprint
from tasks.records import EvaluateResult, PreparedSet, TrainResult
from tasks.redact import discreet
from tasks.speedup.arms import balanced_order, expand
from tasks.speedup.ledger import Ledger
from tasks.speedup.steady import steady_rate
from tasks.speedup.steps import account
from tasks.speedup.study import ArmRun, StudyArm
from tasks.speedup.study_page import study_notes
from tasks.track import run as tracking
from tasks.track.run import RunHandle
from tasks.train.coordinate import TrainJob
from tasks.train.steps import train

MAX_SHARE_OF_REPEATS = 0.25
"""Contaminated trainings are repeated at once, until the study has grown by this share."""


class StudyRequest(BaseModel):
    """What a study is to compare."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    preset: Text
    """Name or path of the preset, for people."""
    config: Config
    """What all arms have in common."""
    axes: dict[str, list[Text]]
    """Setting -> its values, the baseline's first."""
    ladder: bool = False
    """Add one factor at a time instead of the full grid."""
    # The bounds are for the form, and refuse there; `clear_study` and the command say what is wrong in a sentence.
    repeats: int = Field(default=3, json_schema_extra={"minimum": 1})
    """Trainings of each arm."""
    target: float | None = Field(default=None, json_schema_extra={"exclusiveMinimum": 0, "maximum": 1})
    """Validation score (accuracy, mean IoU or SSIM) to which the time is measured; None for the lowest that a baseline
    run ends with."""


@dataclass(frozen=True)
class ReadyArm:
    """An arm, ready to run."""

    arm: StudyArm
    config: Config
    cleared: Cleared


@dataclass(frozen=True)
class _Work:
    """What the trainings of a study share."""

    request: StudyRequest
    site: Site
    address: str
    parent: RunHandle
    prepared: dict[Data, PreparedSet]
    ledger: Ledger


def make_config(config: Config, overrides: list[str]) -> Config:
    """A configuration with overrides.

    Raises:
        ConfigError: the result is not valid.
    """
    tree = config.model_dump(mode="json")
    for override in overrides:
        apply(tree, override)
    return validate(tree)


def clear_study(request: StudyRequest, site: Site) -> list[ReadyArm]:
    """Check every arm before any work starts.

    Raises:
        InputError: naming the arm that cannot run.
    """
    if request.repeats < 1:
        raise InputError(f"repeats={request.repeats}; every arm is trained at least once: use 3 or more for intervals")
    arms = expand(lambda overrides: make_config(request.config, overrides), request.axes, ladder=request.ladder)
    base = request.config.model_copy(update={"speedup": request.config.speedup.model_copy(update={"baseline": "none"})})
    if request.config.speedup.diagnose:
        base = request.config
    ready = []
    for arm in arms:
        config = make_config(base, list(arm.overrides))
        try:
            ready.append(ReadyArm(arm, config, preflight.check(config, site)))
        except InputError as error:
            raise InputError(f"arm {arm.name}: {error}") from error
    return ready


@flow(name="paceline-study", flow_run_name="study {request.config.name}", persist_result=False)
@heard
@discreet
def run_study(request: StudyRequest, resume: str | None = None) -> dict[str, Any]:
    """Train every arm several times in a balanced order, and say what each factor is worth.

    Args:
        request: Arms, repeats and what they have in common.
        resume: Id of an unfinished study to go on with.
    """
    quieten()
    started = time.monotonic()
    site = Site()
    arms = clear_study(request, site)
    cancel_older()
    with open_cluster(request.config.cluster, _demand(arms), site) as address:
        arms = [replace(arm, cleared=preflight.settle(arm.config, arm.cleared, address)) for arm in arms]
        limits = request.config.limits
        stage = tried(prepare, limits)
        prepared = {
            data: stage(data, str(site.root), address, limits.prepare_seconds)
            for data in {arm.config.data: None for arm in arms}
        }
        data = prepared[arms[0].config.data].fingerprint
        workload = workload_fingerprint(request.config.workload, data, arms[0].cleared.weights)
        with tracked("study", request, site, arms[0].cleared.experiment_id, workload, resume) as parent:
            ledger = Ledger(site.root / "runs" / parent.run_id / "arms.jsonl")
            _run_all(_Work(request, site, address, parent, prepared, ledger), arms)
            outcome = StudyOutcome(
                request=request,
                arms=[arm.arm for arm in arms],
                runs=ledger.runs(),
                prepared={found.fingerprint: found for found in prepared.values()},
                hardware=arms[0].cleared.hardware,
                seconds=time.monotonic() - started,
            )
            result, summary = log_study(outcome, parent)
    publish([("", note) for note in study_notes(result)], "study", "What the arms gave")
    views.link(summary["view"], "The trainings of this study")
    return summary | {"result": result.model_dump(mode="json")}


def _demand(arms: list[ReadyArm]) -> Demand:
    on_gpus = any(arm.cleared.plan.accelerator == "gpu" for arm in arms)
    return demand_of([arm.config.execution for arm in arms], "gpu" if on_gpus else "cpu")


def _run_all(work: _Work, arms: list[ReadyArm]) -> None:
    by_name = {arm.arm.name: arm for arm in arms}
    order = balanced_order(list(by_name), work.request.repeats, work.request.config.seed)
    spare = int(MAX_SHARE_OF_REPEATS * len(arms) * work.request.repeats)
    total = len(arms) * work.request.repeats
    for repeat, names in enumerate(order):
        for name in names:
            if work.ledger.has(name, repeat):
                continue
            run = _run_one(work, by_name[name], repeat)
            if run.contaminated and spare:
                spare -= 1
                get_run_logger().warning("%s, repeat %d: %s; once more", name, repeat, "; ".join(run.contamination))
                run = _better(work.parent, run, _run_one(work, by_name[name], repeat))
            work.ledger.add(run)
            get_run_logger().info("%d of %d trainings: %s", work.ledger.num_runs(), total, _line(run))


def _better(parent: RunHandle, first: ArmRun, again: ArmRun) -> ArmRun:
    """The repetition, unless it failed; the MLflow run of the other one says which run counts instead."""
    kept, left = (again, first) if again.status == "done" else (first, again)
    if left.run_id and kept.run_id:
        handle = parent.model_copy(update={"run_id": left.run_id})
        tracking.log_facts(handle, {}, {"paceline.superseded_by": kept.run_id})
    return kept


def _line(run: ArmRun) -> str:
    if run.status == "failed":
        return f"{run.arm} failed: {run.error}"
    rate = f"{run.samples_per_second:,.0f} samples/s" if run.samples_per_second else "no steady state"
    return f"{run.arm}: {rate}" + (", contaminated" if run.contaminated else "")


def _run_one(work: _Work, arm: ReadyArm, repeat: int) -> ArmRun:
    """Train one arm once; a failure is reported as such, and the study goes on."""
    config = arm.config.model_copy(
        update={"seed": work.request.config.seed + repeat, "name": f"{arm.arm.name} #{repeat + 1}"}
    )
    if repeat > 0 and config.speedup.diagnose:  # once is enough
        config = make_config(config, ["speedup.baseline=none", "speedup.diagnose=false"])
    position = work.ledger.num_runs()
    run_id = None
    try:
        with nested(work.parent, config, config.name) as handle:
            run_id = handle.run_id
            prepared = work.prepared[config.data]
            tracking.log_dataset(handle, prepared, config.data.source)
            trained = train(_job(work, arm, config, prepared, handle), work.address)
            evaluated = evaluate(trained, prepared, config.limits.evaluate_seconds)
            speedup = account(trained, arm.cleared.hardware.num_cores) if trained.probe else None
            run = arm_run(arm.arm, trained, evaluated).model_copy(
                update={
                    "repeat": repeat,
                    "position": position,
                    "run_id": run_id,
                    "facts": run_facts(config, prepared, arm.cleared.plan, arm.cleared.pretrained),
                    "cause": speedup.cause if speedup else None,
                    "shares": speedup.shares if speedup else {},
                }
            )
            log_arm(handle, arm.arm, run, trained, evaluated)
            if speedup:
                log_diagnosis(handle, speedup)
            return run
    except PacelineError as error:
        if is_interruption(error):
            raise
        return ArmRun(
            arm=arm.arm.name,
            repeat=repeat,
            position=position,
            run_id=run_id,
            status="failed",
            error=str(error),
            facts=run_facts(config, work.prepared[config.data], arm.cleared.plan, arm.cleared.pretrained),
            world_size=config.execution.world_size,
        )


def _job(work: _Work, arm: ReadyArm, config: Config, prepared: PreparedSet, handle: RunHandle) -> TrainJob:
    return TrainJob(
        config=config,
        plan=arm.cleared.plan,
        prepared=prepared,
        pretrained=arm.cleared.pretrained,
        run_id=handle.run_id,
        tracking_uri=handle.tracking_uri,
        home=str(work.site.root),
        cold_compile=True,  # or the first of the repeats would compile for all
    )


def arm_run(arm: StudyArm, trained: TrainResult, evaluated: EvaluateResult) -> ArmRun:
    """The figures of a training that a study compares."""
    ends = trained.epoch_ends
    lengths = [later - sooner for sooner, later in itertools.pairwise(ends)]
    startup = trained.startup_seconds
    restarted = tuple(f"it was begun again: {restart.cause}" for restart in trained.restarts)
    return ArmRun(
        arm=arm.name,
        repeat=0,
        position=0,
        world_size=trained.world_size,
        num_epochs=trained.num_epochs,
        samples_per_second=steady_rate(trained),
        epoch_seconds=sorted(lengths)[len(lengths) // 2] if lengths else None,
        first_epoch_seconds=ends[0] - startup if ends and startup is not None else None,
        startup_seconds=startup,
        end_to_end_seconds=ends[-1] if ends else None,
        score_name=evaluated.score_name,
        accuracy=evaluated.score,
        num_test=evaluated.num_samples,
        validation=tuple(zip(ends, trained.validation_scores[-len(ends) :], strict=False)),
        time_budget=trained.time_budget,
        data_wait_fraction=trained.data_wait_fraction,
        communication_fraction=trained.communication_fraction,
        idle_fraction=trained.idle_fraction,
        peak_memory_bytes=trained.peak_memory_bytes,
        energy_joules=trained.energy_joules,
        contaminated=bool(restarted) or (trained.validity.contaminated if trained.validity else None),
        contamination=restarted + (trained.validity.reasons if trained.validity else ()),
        predictions=trained.predictions,
        prediction_samples_per_second=evaluated.samples_per_second,
        compile=trained.compile,
    )
