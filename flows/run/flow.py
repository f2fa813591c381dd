"""The pipeline: prepare, train, evaluate, account. Each stage is a Prefect task, the flow is one MLflow run."""

import time
from dataclasses import replace
from hashlib import sha256
from typing import Any

from prefect import flow, get_run_logger

from paceline.conf.config import SELF_CONTAINED_BASELINES, Config
from paceline.conf.environment import Environment
from paceline.flows.checks import preflight
from paceline.flows.checks.measured_plan import train_job
from paceline.flows.checks.prestart import cluster_for_run, cold_seconds
from paceline.flows.checks.space import require_space
from paceline.flows.lifecycle import mlflow_views
from paceline.flows.lifecycle.mlflow_run import open_run
from paceline.flows.lifecycle.outage import guard_flow, publish, with_retries
from paceline.flows.lifecycle.overlap import cancel_older
from paceline.flows.run import history, registry
from paceline.flows.run.record import Outcome, log_model, record, summarise
from paceline.flows.run.starts import confirm_regression, measure_starts
from paceline.tasks.cluster.tls import choose_tls
from paceline.tasks.data.prefect_tasks import prepare
from paceline.tasks.errors import RunError
from paceline.tasks.evaluate.prefect_tasks import evaluate
from paceline.tasks.fingerprint import workload_fingerprint
from paceline.tasks.names import Tag
from paceline.tasks.report.summary import summary_table
from paceline.tasks.speedup.baselines.ratios import add_ratios
from paceline.tasks.speedup.evidence.archive import analysis_plan
from paceline.tasks.speedup.limit_share import add_share
from paceline.tasks.speedup.prefect_tasks import account
from paceline.tasks.track.run import RunHandle, log_dataset, set_tags
from paceline.tasks.train.autotune.cache import AutotuneCache
from paceline.tasks.train.prefect_tasks import train


@flow(name="paceline-run", flow_run_name="{config.name}", persist_result=False)
@guard_flow
def run_pipeline(config: Config, resume: str | None = None) -> dict[str, Any]:
    """Prepare data, train, evaluate, and account for the speed of it.

    Args:
        config: All settings of the run; see the help of each field.
        resume: Id of an unfinished MLflow run, which continues from its newest checkpoint.
    """
    started = time.monotonic()
    environment = Environment()
    checked = preflight.result_of(preflight.check, config, environment)
    cancel_older()  # only now: a refused run must not cancel its predecessor
    tls = choose_tls(config.cluster)
    get_run_logger().info("cluster.tls=%s: %s", tls.value, tls.reason)
    get_run_logger().info("data.stored_size=%s: %s", *config.stored_size)
    with cluster_for_run(config, checked.plan, environment) as cluster:
        checked = preflight.confirm_on_cluster(config, checked, cluster.address)
        try:
            prepare_data = with_retries(prepare, config.limits)
            limit = config.limits.prepare_seconds  # a resume follows a fault, which may have damaged the set
            is_resume = resume is not None
            prepared = prepare_data(config.stored_data, str(environment.root), cluster.address, limit, is_resume)
        except RunError:  # leaves a FAILED run in MLflow; wrong input leaves none
            with open_run("run", config, environment, checked.experiment_id, "", resume):
                raise
        get_run_logger().info("%s", require_space(config, environment, checked.checkpoint_bytes))
        workload = workload_fingerprint(config.workload, prepared.fingerprint, checked.weights)
        with open_run("run", config, environment, checked.experiment_id, workload, resume) as handle:
            log_dataset(handle, prepared, config.data.source)
            set_tags(handle, {Tag.ANALYSIS_PLAN: sha256(analysis_plan(config.speedup)).hexdigest()})
            cache = AutotuneCache(environment.root, config, checked.hardware, prepared)
            options = {"resume": resume is not None, "search": cache.find(), "may_search": True}
            job = train_job(config, checked, prepared, handle.run_id, environment, **options)
            trained = train(job, cluster.address)
            starts = measure_starts(job, trained, cluster.address)
            if config.track.on_regression != "confirm":
                cluster.release()
            cache.keep(trained.search)
            require_space(config, environment, 0, has_run=True)
            plan = trained.plan or checked.plan
            evaluated = evaluate(trained, prepared, config.limits.evaluate_seconds, job.directory)
            outcome = Outcome(
                config, plan, prepared, trained, evaluated, workload, checked.hardware, checked.pretrained
            )
            if config.speedup.baseline in SELF_CONTAINED_BASELINES:
                outcome = replace(outcome, earlier=history.earlier_ratios(outcome, handle), starts=starts)
                speedup = account(trained, checked.hardware.num_cores, outcome.earlier, starts)
            else:
                speedup = history.speedup_over_others(outcome, handle)
                get_run_logger().info("%s", speedup.verdict)
            outcome = replace(outcome, speedup=add_share(speedup, outcome.share))
            summary = _record(outcome, handle, started)
        registry.promote(outcome, summary["registered"], handle)  # a run that is KILLED has no champion
        summary = confirm_regression(outcome, job, cluster.address, handle, summary)
    publish(summary_table(summary), "summary", "What the run achieved and how fast")
    mlflow_views.link(summary["view"], "This run among those like it")
    history.report_regression(outcome, summary)
    return summary


def _record(outcome: Outcome, handle: RunHandle, started: float) -> dict[str, Any]:
    log_model(outcome, handle)
    judgement = history.judge_run(outcome, handle)
    outcome = replace(
        outcome,
        judgement=judgement,
        prediction=history.check_prediction(outcome, handle),
        registered=registry.register_model(outcome, judgement, handle),
    )
    view = mlflow_views.share_with_like(handle, outcome.series, outcome.evaluated.score_name)
    speedup = add_ratios(outcome.speedup, outcome.config, outcome.prepared, outcome.trained, cold_seconds())
    outcome = replace(outcome, speedup=speedup)
    summary = summarise(outcome, handle, view, time.monotonic() - started)
    record(outcome, handle, summary)
    return summary
