"""The stages of a run of a preset."""

import time
from dataclasses import replace
from typing import Any

from prefect import get_run_logger

from paceline.conf.config import SELF_CONTAINED_BASELINES
from paceline.flows.checks.measured_plan import train_job
from paceline.flows.checks.prestart import cold_seconds
from paceline.flows.lifecycle import mlflow_views
from paceline.flows.lifecycle.outage import with_retries
from paceline.flows.run import history, registry
from paceline.flows.run.evidence import log_plan
from paceline.flows.run.outcome import Outcome
from paceline.flows.run.record import log_model, record, summarise
from paceline.flows.run.session import Session
from paceline.flows.run.starts import measure_starts
from paceline.tasks.data import prefect_tasks as data_tasks
from paceline.tasks.disk_space import require_space
from paceline.tasks.errors import RunError
from paceline.tasks.evaluate import prefect_tasks as evaluate_tasks
from paceline.tasks.fingerprint import workload_fingerprint
from paceline.tasks.records.data import PreparedSet
from paceline.tasks.records.record import Record
from paceline.tasks.records.training import EvaluateResult, TrainResult
from paceline.tasks.speedup import prefect_tasks as speedup_tasks
from paceline.tasks.speedup.baselines.ratios import add_ratios
from paceline.tasks.speedup.limit_share import add_share
from paceline.tasks.speedup.records import SpeedupResult
from paceline.tasks.track.run import log_dataset
from paceline.tasks.train import prefect_tasks as train_tasks
from paceline.tasks.train.autotune.cache import AutotuneCache
from paceline.tasks.train.autotune.choice import without_failed_graph


class Summary(Record):
    """Result of a run: the keys of `paceline run --json`, which `reference/outputs.md` explains."""

    run_id: str
    experiment: str
    tracking_uri: str  # without credentials
    workload: str
    dataset: dict[str, Any]
    pretrained: dict[str, Any] | None
    train: dict[str, Any]
    evaluate: EvaluateResult
    speedup: SpeedupResult
    prediction: dict[str, Any] | None
    regression: dict[str, Any] | None
    registered: dict[str, Any] | None
    view: str
    time_budget: dict[str, float]  # seconds
    execution: dict[str, Any]
    seconds: float


def prepare(session: Session) -> PreparedSet:
    """Prepare the data, or find them prepared, and open the MLflow run; a failure leaves a FAILED run."""
    config, environment = session.config, session.environment
    get_run_logger().info("data.stored_size=%s: %s", *config.stored_size)
    try:
        prepare_data = with_retries(data_tasks.prepare, config.limits)
        limit = config.limits.prepare_seconds  # a resume follows a fault, which may have damaged the set
        is_resume = session.resume is not None
        prepared = prepare_data(config.stored_data, str(environment.root), session.cluster.address, limit, is_resume)
    except RunError:  # leaves a FAILED run in MLflow; wrong input leaves none
        session.open_run("")
        raise
    parts = {"checkpoints": sum(session.checked.checkpoint_bytes)}
    get_run_logger().info("%s", require_space(config.limits, environment.root, parts))
    workload = workload_fingerprint(config.workload, prepared.fingerprint, session.checked.weights)
    handle = session.open_run(workload)
    log_dataset(handle, prepared, config.data.source)
    log_plan(handle, config)
    return prepared


def train(session: Session, prepared: PreparedSet) -> TrainResult:
    """Train on the cluster, with the probe before the first step, and time further starts of the process."""
    config, address = session.config, session.cluster.address
    cache = AutotuneCache(session.environment.root, config, session.checked.hardware, prepared)
    search = cache.find()
    checked = replace(session.checked, plan=without_failed_graph(session.checked.plan, search))
    options = {"resume": session.resume is not None, "search": search, "may_search": True}
    job = train_job(config, checked, prepared, session.handle.run_id, session.environment, **options)
    session.training, trained = job, train_tasks.train(job, address)
    session.starts = measure_starts(job, trained, address)
    if not config.track.confirms:
        session.cluster.release()
    cache.keep(trained.search)
    require_space(config.limits, session.environment.root, {}, RunError)
    return trained


def evaluate(session: Session, prepared: PreparedSet, trained: TrainResult) -> EvaluateResult:
    """Measure the quality on the test split."""
    directory = session.environment.root / "runs" / session.handle.run_id
    return evaluate_tasks.evaluate(trained, prepared, session.config.limits.evaluate_seconds, directory)


def judge(session: Session, prepared: PreparedSet, trained: TrainResult, evaluated: EvaluateResult) -> dict[str, Any]:
    """Judge the speed and the quality against the baseline and earlier runs, and record it; the summary as JSON."""
    config, checked, handle = session.config, session.checked, session.handle
    plan = trained.plan or checked.plan
    outcome = Outcome(
        config=config,
        plan=plan,
        prepared=prepared,
        trained=trained,
        evaluated=evaluated,
        workload=session.workload,
        hardware=checked.hardware,
        pretrained=checked.pretrained,
    )
    if config.speedup.baseline in SELF_CONTAINED_BASELINES:
        outcome = replace(outcome, earlier=history.earlier_ratios(outcome, handle), starts=session.starts)
        speedup = speedup_tasks.account(trained, checked.hardware.num_cores, outcome.earlier, session.starts)
    else:
        speedup = history.speedup_over_others(outcome, handle)
        get_run_logger().info("%s", speedup.verdict)
    outcome = replace(outcome, speedup=add_share(speedup, outcome.share))
    log_model(outcome, handle)
    judgement = history.judge_run(outcome, handle)
    outcome = replace(
        outcome,
        judgement=judgement,
        prediction=history.check_prediction(outcome, handle),
        registered=registry.register_model(outcome, judgement, handle),
    )
    view = mlflow_views.share_with_like(handle, outcome.series, [outcome.evaluated.score_name])
    speedup = add_ratios(outcome.speedup, config, prepared, trained, cold_seconds())
    session.outcome = outcome = replace(outcome, speedup=speedup)
    session.summary = summarise(outcome, handle, view, time.monotonic() - session.started)
    record(outcome, handle, session.summary)
    return session.summary
