"""The pipeline: prepare, train, evaluate, account; every stage a Prefect task, the whole one MLflow run."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from prefect import flow, get_run_logger

from paceline.conf.config import SELF_CONTAINED_BASELINES, Config
from paceline.conf.environment import Environment, quieten
from paceline.flows.checks import preflight
from paceline.flows.checks.preflight import PreflightResult
from paceline.flows.lifecycle import mlflow_views as views
from paceline.flows.lifecycle.mlflow_run import new_run, resume_run
from paceline.flows.lifecycle.outage import outlive_outages
from paceline.flows.lifecycle.overlap import cancel_older
from paceline.flows.lifecycle.prefect_artifacts import publish
from paceline.flows.lifecycle.retries import with_retries
from paceline.flows.lifecycle.signals import stop_on_signal
from paceline.flows.run import history
from paceline.flows.run import registry as handoff
from paceline.flows.run.baseline import speedup_over_others
from paceline.flows.run.forecast_check import check_prediction
from paceline.flows.run.outcome import Outcome, Verdicts
from paceline.flows.run.prestart import cluster_for_run, preflight_result
from paceline.flows.run.record import log_model, record, summarise
from paceline.tasks.cluster.tls import choose_tls
from paceline.tasks.data.prefect_tasks import prepare
from paceline.tasks.errors import RunError
from paceline.tasks.evaluate.prefect_tasks import evaluate
from paceline.tasks.fingerprint import workload_fingerprint
from paceline.tasks.records import PreparedSet
from paceline.tasks.redact import redact_errors
from paceline.tasks.report.summary import summary_table
from paceline.tasks.speedup.prefect_tasks import account
from paceline.tasks.speedup.records import SpeedupResult
from paceline.tasks.track.run import RunHandle, log_dataset
from paceline.tasks.train.autotune.cache import AutotuneCache
from paceline.tasks.train.launch.coordinator import TrainJob
from paceline.tasks.train.prefect_tasks import train


@flow(name="paceline-run", flow_run_name="{config.name}", persist_result=False)
@stop_on_signal
@outlive_outages
@redact_errors
def run_pipeline(config: Config, resume: str | None = None) -> dict[str, Any]:
    """Prepare data, train, evaluate, and account for the speed of it.

    Args:
        config: Everything the run can be told; see the help of each field.
        resume: Id of an unfinished MLflow run to go on with, from its newest checkpoint.
    """
    quieten()
    started = time.monotonic()
    site = Environment()
    cleared = preflight_result(config, site)
    cancel_older()  # not before it is known that this run can begin
    tls = choose_tls(config.cluster)
    get_run_logger().info("cluster.tls=%s: %s", tls.value, tls.reason)
    with cluster_for_run(config, cleared.plan, site) as cluster:
        cleared = preflight.confirm_on_cluster(config, cleared, cluster.address)
        prepared = _prepared(config, site, cleared, cluster.address, resume)
        workload = workload_fingerprint(config.workload, prepared.fingerprint, cleared.weights)
        if resume is None:
            tracked = new_run(config, site, cleared.experiment_id, "run", workload)
        else:
            tracked = resume_run(site, resume, "run", workload)
        with tracked as handle:
            log_dataset(handle, prepared, config.data.source)
            searches = AutotuneCache(site.root, config, cleared.hardware, prepared)
            job = TrainJob(
                config=config,
                plan=cleared.plan,
                prepared=prepared,
                pretrained=cleared.pretrained,
                run_id=handle.run_id,
                tracking_uri=handle.tracking_uri,
                home=str(site.root),
                resume=resume is not None,
                search=searches.find(),
                may_search=True,
            )
            trained = train(job, cluster.address)
            cluster.release()
            searches.keep(trained.search)
            plan = trained.plan or cleared.plan
            evaluated = evaluate(trained, prepared, config.limits.evaluate_seconds, job.directory)
            outcome = Outcome(
                config, plan, prepared, trained, evaluated, workload, cleared.hardware, cleared.pretrained
            )
            outcome = replace(outcome, speedup=_speedup(outcome, handle))
            summary = _accounted(outcome, handle, started)
    _show(summary)
    history.report_regression(outcome, summary)
    return summary


def _prepared(
    config: Config, site: Environment, cleared: PreflightResult, address: str, resume: str | None
) -> PreparedSet:
    """The prepared set. Where the preparation fails, MLflow is told by a run, which has no part in wrong input."""
    stage = with_retries(prepare, config.limits)
    try:
        return stage(config.data, str(site.root), address, config.limits.prepare_seconds)
    except RunError:
        unready = resume_run(site, resume, "run") if resume else new_run(config, site, cleared.experiment_id, "run")
        with unready:
            raise


def _speedup(outcome: Outcome, handle: RunHandle) -> SpeedupResult:
    if outcome.config.speedup.baseline in SELF_CONTAINED_BASELINES:
        return account(outcome.trained, outcome.hardware.num_cores)
    found = speedup_over_others(outcome, handle)
    get_run_logger().info("%s", found.verdict)
    return found


def _accounted(outcome: Outcome, handle: RunHandle, started: float) -> dict[str, Any]:
    """Judge what the stages have found, record it, and hand the model on."""
    log_model(outcome, handle)
    judgement = history.judge_run(outcome, handle)
    verdicts = Verdicts(
        prediction=check_prediction(handle, outcome.config, outcome.plan, outcome.workload, outcome.speedup),
        judgement=judgement,
        registered=handoff.register_model(outcome, judgement, handle),
    )
    view = views.share_with_like(handle, outcome.series, outcome.evaluated.score_name)
    summary = summarise(outcome, verdicts, handle, view, time.monotonic() - started)
    record(outcome, verdicts, handle, summary)
    handoff.promote(outcome, verdicts.registered, handle)
    return summary


def _show(summary: dict[str, Any]) -> None:
    publish(summary_table(summary), "summary", "What the run achieved and how fast")
    views.link(summary["view"], "This run among those like it")
