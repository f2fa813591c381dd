"""A training of the user's own Lightning code: prepare its data, train, account. The flow is one MLflow run."""

import time
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger

from paceline.conf.config import Config
from paceline.conf.environment import Environment
from paceline.flows.checks import preflight
from paceline.flows.checks.prestart import cluster_for_run
from paceline.flows.checks.results import result_of
from paceline.flows.lifecycle.mlflow_run import open_run
from paceline.flows.lifecycle.outage import guard_flow
from paceline.flows.lifecycle.prefect_artifacts import publish
from paceline.tasks.cluster.tls import choose_tls
from paceline.tasks.fingerprint import lightning_fingerprint
from paceline.tasks.names import Artifact, Metric
from paceline.tasks.records.execution import Plan
from paceline.tasks.records.training import ModuleResult
from paceline.tasks.redact import redact
from paceline.tasks.report.summary import summary_table
from paceline.tasks.track import run as tracking
from paceline.tasks.track.environment import describe_environment
from paceline.tasks.track.run import RunHandle
from paceline.tasks.train.launch.coordinator import TrainJob
from paceline.tasks.train.lightning import code
from paceline.tasks.train.prefect_tasks import fit_module, prepare_module_data

NOT_MEASURED = ("speedup", "share of the device's limit", "energy", "prediction", "history of earlier runs")
"""Parts of the summary of a preset that a training of own code does not have so far."""
TRAIN_KEYS = (
    *("world_size", "num_epochs", "num_batches", "num_steps", "seconds", "samples_per_second", "checkpoint"),
    *("resumed_from", "data_wait_fraction", "wall_seconds", "clock_difference", "restarts"),
)


@flow(name="paceline-lightning", flow_run_name="{config.name}", persist_result=False)
@guard_flow
def run_lightning(config: Config, resume: str | None = None) -> dict[str, Any]:
    """Train the user's own Lightning code, and account for the time of it.

    Args:
        config: All settings of the run; those of LightningCLI are in its section `lightning`.
        resume: Id of an unfinished MLflow run, which continues from its newest checkpoint.
    """
    started = time.monotonic()
    environment, own = Environment(), config.lightning
    checked = result_of(preflight.check_lightning, config, environment)
    tls = choose_tls(config.cluster)
    get_run_logger().info("cluster.tls=%s: %s", tls.value, tls.reason)
    workload = lightning_fingerprint(own)
    with (
        cluster_for_run(config, checked.plan, environment) as cluster,
        open_run("run", config, environment, checked.experiment_id, workload, resume) as handle,
    ):
        checked = preflight.confirm_on_cluster(config, checked, cluster.address)
        job = TrainJob(
            config=config,
            plan=checked.plan,
            packages=own.packages,
            run_id=handle.run_id,
            tracking_uri=environment.tracking_uri,
            home=str(environment.root),
            resume=resume is not None,
        )
        if own.code is not None:
            code.copy(Path(own.code), job.directory)
        if own.prepares_data:
            prepare_module_data(job, cluster.address)
        trained = fit_module(job, cluster.address)
        cluster.release()
        summary = {
            **{"run_id": handle.run_id, "experiment": handle.experiment, "workload": workload},
            "tracking_uri": redact(handle.tracking_uri),
            "packages": own.packages,
            "train": trained.model_dump(mode="json", include={*TRAIN_KEYS}),
            "metrics": trained.metrics,
            "time_budget": trained.time_budget,
            "execution": checked.plan.model_dump(mode="json"),
            "not_measured": NOT_MEASURED,
            "seconds": time.monotonic() - started,
        }
        _record(handle, trained, checked.plan, summary, job)
    publish(summary_table(summary), "summary", "What the run achieved and how fast")
    return summary


def _record(handle: RunHandle, trained: ModuleResult, plan: Plan, summary: dict[str, Any], job: TrainJob) -> None:
    metrics: dict[str, float | None] = {
        Metric.THROUGHPUT: trained.samples_per_second,
        Metric.DATA_WAIT_FRACTION: trained.data_wait_fraction,
        Metric.WALL_SECONDS: summary["seconds"],
        Metric.CLOCK_DIFFERENCE: trained.clock_difference,
        Metric.PEAK_MEMORY: trained.peak_memory_bytes,
        Metric.NUM_RESTARTS: len(trained.restarts),
        Metric.LOST_STEPS: sum(restart.lost_steps for restart in trained.restarts),
    }
    metrics |= {Metric.seconds(item): seconds for item, seconds in trained.time_budget.items()}
    tags = {f"paceline.auto.{name}": f"{choice.value}: {choice.reason}" for name, choice in plan.reasons.items()}
    tracking.log_facts(handle, metrics, tags)
    tracking.log_document(handle, Artifact.SUMMARY, summary)
    environment = describe_environment(trained.hosts, trained.devices) | {"packages": [*summary["packages"]]}
    tracking.log_document(handle, Artifact.ENVIRONMENT, environment)
    attempt = max(job.directory.glob("attempt-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    for rank in range(trained.world_size):
        tracking.log_document(handle, f"logs/rank-{rank}.txt", attempt / f"rank-{rank}" / "log.txt")
