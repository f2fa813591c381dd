"""A run of the user's own Lightning code and its stages: prepare, train, evaluate, account. It is one MLflow run."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger

from paceline.conf.config import SELF_CONTAINED_BASELINES, Config
from paceline.conf.environment import Environment
from paceline.flows.checks.lightning import read_again
from paceline.flows.checks.measured_plan import train_job
from paceline.flows.checks.origin import is_from_api
from paceline.flows.lifecycle.mlflow_views import share_with_like
from paceline.flows.lifecycle.outage import guard_flow
from paceline.flows.run import history, registry
from paceline.flows.run.evidence import log_evidence, log_plan
from paceline.flows.run.metrics import recovery_metrics, speedup_metrics, speedup_tags, training_metrics
from paceline.flows.run.outcome import ModuleOutcome, judged_metrics
from paceline.flows.run.session import OwnSession, open_session
from paceline.tasks.disk_space import require_space
from paceline.tasks.errors import RunError
from paceline.tasks.files import sha256_of
from paceline.tasks.fingerprint import lightning_fingerprint
from paceline.tasks.metrics_file import attempt_number
from paceline.tasks.names import Artifact, Metric, Tag
from paceline.tasks.records.data import ModuleFacts, PreparedPartitions
from paceline.tasks.records.execution import Plan
from paceline.tasks.records.measurement import AutotuneResult
from paceline.tasks.records.record import Record
from paceline.tasks.records.training import ModuleResult
from paceline.tasks.redact import redact_tree
from paceline.tasks.speedup import prefect_tasks as speedup_tasks
from paceline.tasks.speedup.baselines.ratios import add_ratios
from paceline.tasks.speedup.limit_share import SHARES, add_share
from paceline.tasks.speedup.records import SpeedupResult
from paceline.tasks.speedup.steady_state import steady_rate
from paceline.tasks.track import run as tracking
from paceline.tasks.track.environment import describe_environment
from paceline.tasks.track.queries import get_runs
from paceline.tasks.track.registry import log_model
from paceline.tasks.track.run import RunHandle
from paceline.tasks.train.autotune.cache import AutotuneCache
from paceline.tasks.train.launch.coordinator import TrainJob
from paceline.tasks.train.launch.layout import SEARCH_FILE
from paceline.tasks.train.lightning import code
from paceline.tasks.train.prefect_tasks import fit_module, partitions_of, prepare_module_data, with_partitions

NOT_MEASURED = ("energy",)
"""Parts of the summary of a preset that a training of own code does not have so far."""
TRAIN_KEYS = (
    *("world_size", "num_epochs", "num_batches", "num_steps", "seconds", "samples_per_second", "units_per_second"),
    *("checkpoint", "resumed_from", "data_wait_fraction", "wall_seconds", "clock_difference", "restarts", "compile"),
    *("limit", "validity", "best_models"),
)


class OwnSummary(Record):
    """Result of a run of own Lightning code: the keys of `paceline run --json`, see `reference/outputs.md`."""

    run_id: str
    experiment: str
    tracking_uri: str  # without credentials
    workload: str
    packages: tuple[str, ...]
    train: dict[str, Any]
    speedup: SpeedupResult
    prediction: dict[str, Any] | None
    regression: dict[str, Any] | None
    metrics: dict[str, float]
    partitions: PreparedPartitions | None
    registered: dict[str, Any] | None
    view: str
    time_budget: dict[str, float]  # seconds
    execution: Plan
    not_measured: tuple[str, ...]
    seconds: float


class OwnEvaluation(Record):
    """Values that a module logged in its training and its test."""

    metrics: dict[str, float]  # the newest value of each, if it is finite
    not_finite: tuple[str, ...]  # the other metrics
    not_tested: str | None  # reason not to use the metrics of the test; None without one


@flow(name="paceline-lightning", flow_run_name="{config.name}", persist_result=False)
@guard_flow
def run_lightning(config: Config, resume: str | None = None) -> dict[str, Any]:
    """Train the user's own Lightning code, and account for the time of it.

    Args:
        config: All settings of the run; those of LightningCLI are in its section `lightning`.
        resume: Id of an unfinished MLflow run, which continues from its newest checkpoint.
    """
    if is_from_api():
        run_id = resume if resume and resume.isalnum() else ""  # it comes from a form, and is to name a directory
        environment = Environment()
        config = read_again(config, environment.root / "runs" / run_id if run_id else None, environment)
    with open_session(OwnSession, config, resume) as stages:
        prepared = prepare(stages)
        trained = train(stages, prepared)
        judge(stages, trained, evaluate(stages, trained))
    return stages.summary


def prepare(session: OwnSession) -> PreparedPartitions | None:
    """Open the MLflow run, copy the code, and prepare the data on each host; the partitions of data that have some."""
    config, environment, address = session.config, session.environment, session.cluster.address
    handle = session.open_run(lightning_fingerprint(config.lightning))
    options = {"resume": session.resume is not None, "may_search": True}
    job = train_job(config, session.checked, None, handle.run_id, environment, **options)
    log_plan(handle, config)
    session.training = job = prepare_own(job, address)
    return with_partitions(job, address).partitions


def train(session: OwnSession, prepared: PreparedPartitions | None) -> ModuleResult:
    """Train on the cluster, with the probe before the first step, and run the test loop, if there is one."""
    config, environment, job = session.config, session.environment, session.job
    cache = AutotuneCache(environment.root, config, session.checked.hardware)
    search = _interrupted_search(job.directory) or cache.find()
    job = job.model_copy(update={"search": search, "partitions": prepared})
    trained = fit_module(job, session.cluster.address)
    session.cluster.release()
    require_space(config.limits, environment.root, {}, RunError)
    cache.keep(trained.search)
    return trained


def evaluate(session: OwnSession, trained: ModuleResult) -> OwnEvaluation:
    """The values that the module logged in the training and its test, which `train` has run; warns of missing ones."""
    log, score = get_run_logger(), _outcome(session, trained).score
    if score is not None and score.name not in {*trained.metrics, *trained.not_finite}:
        text = "the training logs no metric %s, by which it is to be judged; it logs %s"
        log.warning(text, score.name, ", ".join(trained.metrics) or "none")
    if trained.not_tested is not None:
        log.warning("test_step: %s; trainer.limit_test_batches=0 leaves it out", trained.not_tested)
    fields = ("metrics", "not_finite", "not_tested")
    return OwnEvaluation.model_validate({name: getattr(trained, name) for name in fields})


def judge(session: OwnSession, trained: ModuleResult, evaluated: OwnEvaluation) -> dict[str, Any]:
    """Judge the speed and the quality against the baseline and earlier runs, and record it; the summary as JSON."""
    config, module, handle = session.config, session.config.lightning, session.handle
    outcome = _outcome(session, trained)
    if config.speedup.baseline in SELF_CONTAINED_BASELINES:
        outcome = replace(outcome, earlier=history.earlier_ratios(outcome, handle))
        speedup = speedup_tasks.account(trained, outcome.hardware.num_cores, outcome.earlier)
    else:
        speedup = history.speedup_over_others(outcome, handle)
        get_run_logger().info("%s", speedup.verdict)
    speedup = add_ratios(add_share(speedup, outcome.share), config, None, trained, None)
    outcome = replace(outcome, speedup=speedup)
    outcome = replace(outcome, judgement=history.judge_run(outcome, handle))
    if trained.weights is not None:
        weights, settings = Path(trained.weights), redact_tree(module.settings)
        precision, digest = outcome.plan.precision, sha256_of(weights)
        facts = ModuleFacts(settings=settings, packages=module.packages, precision=precision, weights_sha256=digest)
        log_model(handle, facts, weights)
    registered = registry.register_module(outcome, handle)
    view = share_with_like(handle, outcome.series, [outcome.score_metric] if outcome.score else [])
    untested = () if evaluated.not_tested is None else (f"test_step ({evaluated.not_tested})",)
    session.summary = {
        **{"run_id": handle.run_id, "experiment": handle.experiment, "workload": session.workload},
        "tracking_uri": handle.public_uri,
        "packages": module.packages,
        "train": trained.model_dump(mode="json", include={*TRAIN_KEYS})
        | outcome.share.model_dump(mode="json", include={*SHARES})
        | {"steady_samples_per_second": steady_rate(trained)},
        "speedup": speedup.model_dump(mode="json"),
        "prediction": history.check_prediction(outcome, handle),
        "regression": outcome.judgement and outcome.judgement.model_dump(mode="json"),
        "metrics": evaluated.metrics,
        "partitions": trained.partitions and trained.partitions.model_dump(),
        "registered": registered,
        "view": view,
        "time_budget": trained.time_budget,
        "execution": outcome.plan.model_dump(mode="json"),
        "not_measured": (*NOT_MEASURED, *untested),
        "seconds": time.monotonic() - session.started,
    }
    _record(handle, outcome, session.summary, session.job)
    session.outcome = outcome
    return session.summary


def _outcome(session: OwnSession, trained: ModuleResult) -> ModuleOutcome:
    return ModuleOutcome(
        config=session.config,
        plan=trained.plan or session.checked.plan,
        trained=trained,
        workload=session.workload,
        hardware=session.checked.hardware,
    )


def prepare_own(job: TrainJob, address: str) -> TrainJob:
    """Copy the user's code and checkpoint into the run's directory, and prepare the data.

    Returns the job with the hosts on which `prepare_data` has run. A resume checks the content of prepared partitions,
    which the fault before it may have damaged.
    """
    code.copy_own(job.config.lightning, job.directory)
    if job.config.lightning.prepares_data:
        job = prepare_module_data(job, address)
    if job.resume:
        partitions_of(job, address, check_content=True)
    return job


def _interrupted_search(directory: Path) -> AutotuneResult | None:
    """The newest search in a run's attempts, so that a resumed run keeps its execution; None without one."""
    found = directory.glob(f"attempt-*/rank-0/{SEARCH_FILE}")
    newest = max(found, key=lambda path: attempt_number(path.parents[1]), default=None)
    return AutotuneResult.model_validate_json(newest.read_bytes()) if newest else None


def _record(handle: RunHandle, outcome: ModuleOutcome, summary: dict[str, Any], job: TrainJob) -> None:
    trained, speedup = outcome.trained, outcome.speedup
    metrics = training_metrics(trained) | recovery_metrics(trained) | speedup_metrics(speedup)
    (recorded,) = get_runs(handle.tracking_uri, [handle.run_id], is_patient=True)
    judged = {name: value for name, value in judged_metrics(outcome).items() if name not in recorded.metrics}
    metrics |= judged | {Metric.WALL_SECONDS: summary["seconds"]}
    tags = {Tag.DATASET: trained.partitions.fingerprint} if trained.partitions else {}
    tracking.log_facts(handle, metrics, speedup_tags(speedup, handle.run_id) | outcome.tags | tags)
    tracking.log_interval(handle, Metric.SPEEDUP_INTERVAL, speedup.ratio, speedup.low, speedup.high)
    tracking.log_document(handle, Artifact.SUMMARY, summary)
    environment = describe_environment(trained.hosts, trained.devices) | {"packages": [*summary["packages"]]}
    tracking.log_document(handle, Artifact.ENVIRONMENT, environment)
    tracking.log_document(handle, Artifact.FACTS, outcome.facts)
    log_evidence(handle, (job.config, trained, speedup), summary, environment, earlier=outcome.earlier)
    attempt = max(job.directory.glob("attempt-*"), key=attempt_number)
    for rank in range(trained.world_size):
        tracking.log_document(handle, f"logs/rank-{rank}.txt", attempt / f"rank-{rank}" / "log.txt")
