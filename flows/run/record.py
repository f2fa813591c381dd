"""Results of a run of a preset and their record: the summary of `--json`, and everything in MLflow."""

from pathlib import Path
from typing import Any

from paceline.flows.lifecycle.mlflow_views import log_report
from paceline.flows.run.evidence import log_evidence
from paceline.flows.run.metrics import recovery_metrics, speedup_metrics, speedup_tags
from paceline.flows.run.outcome import Outcome, judged_metrics, stage_metrics
from paceline.tasks.files import sha256_of
from paceline.tasks.model_bundle import build_model_facts
from paceline.tasks.names import Artifact, Metric, Tag
from paceline.tasks.report.quality_charts import quality_figures
from paceline.tasks.report.run_report import ReportInput, draw_speed, render_report
from paceline.tasks.speedup.limit_share import SHARES
from paceline.tasks.speedup.steady_state import steady_rate
from paceline.tasks.track import registry
from paceline.tasks.track import run as tracking
from paceline.tasks.track.environment import describe_environment
from paceline.tasks.track.rebuild import package_commits
from paceline.tasks.track.run import RunHandle

TRAIN_KEYS = (
    *("world_size", "num_epochs", "num_steps", "seconds", "samples_per_second", "final_loss", "checkpoint"),
    *("resumed_from", "data_wait_fraction", "wall_seconds", "clock_difference", "restarts", "compile"),
    *("cost", "limit", "energy", "validity"),
)
DATASET_KEYS = (
    *("fingerprint", "num_train", "num_validation", "num_test", "num_rejected"),
    *("reused", "seconds", "storage", "stored_size"),
)


def summarise(outcome: Outcome, handle: RunHandle, view: str, seconds: float) -> dict[str, Any]:
    """The JSON of `paceline run`; names and shape are the public contract."""
    return {
        "run_id": handle.run_id,
        "experiment": handle.experiment,
        "tracking_uri": handle.public_uri,
        "workload": outcome.workload,
        "dataset": {key: getattr(outcome.prepared, key) for key in DATASET_KEYS},
        "pretrained": outcome.pretrained and outcome.pretrained.model_dump(mode="json"),
        "train": outcome.trained.model_dump(mode="json", include={*TRAIN_KEYS})
        | outcome.share.model_dump(mode="json", include={*SHARES})
        | {"steady_samples_per_second": steady_rate(outcome.trained)},
        "evaluate": outcome.evaluated.model_dump(mode="json"),
        "speedup": outcome.speedup.model_dump(mode="json"),
        "prediction": outcome.prediction,
        "regression": outcome.judgement and outcome.judgement.model_dump(mode="json"),
        "registered": outcome.registered,
        "view": view,
        "time_budget": outcome.trained.time_budget,
        "execution": outcome.plan.model_dump(mode="json") | {"arithmetic": outcome.plan.arithmetic},
        "seconds": seconds,
    }


def record(outcome: Outcome, handle: RunHandle, summary: dict[str, Any]) -> None:
    """Log metrics, tags, the report, its pictures and the files behind them to the MLflow run."""
    tracking.log_facts(handle, _metrics(outcome, summary), _tags(outcome, handle))
    speedup = outcome.speedup
    tracking.log_interval(handle, Metric.SPEEDUP_INTERVAL, speedup.ratio, speedup.low, speedup.high)
    environment = describe_environment(outcome.trained.hosts, outcome.trained.devices)
    environment["packages"] = [package.identity for package in outcome.config.packages]
    environment["commits"] = package_commits(outcome.config.packages)
    signal = outcome.config.data.used_signal
    quality = quality_figures(outcome.evaluated, outcome.trained, outcome.prepared, signal.axes if signal else None)
    report = ReportInput(
        summary=summary,
        config=outcome.config,
        plan=outcome.plan,
        prepared=outcome.prepared,
        train=outcome.trained,
        speedup=outcome.speedup,
        share=outcome.share,
        evaluate=outcome.evaluated,
        figures=quality,
        environment=environment,
    )
    figures = draw_speed(outcome.speedup, outcome.trained, outcome.trained.time_budget)
    log_report(handle, render_report(report), figures | quality)
    tracking.log_document(handle, Artifact.SUMMARY, summary)
    tracking.log_document(handle, Artifact.ENVIRONMENT, environment)
    tracking.log_document(handle, Artifact.FACTS, outcome.facts)
    measured = outcome.config, outcome.trained, outcome.speedup
    log_evidence(handle, measured, summary, environment, outcome.starts, outcome.earlier)
    if outcome.prepared.num_rejected:
        tracking.log_document(handle, Artifact.REJECTED, Path(outcome.prepared.path) / Artifact.REJECTED)
    for index, path in enumerate(outcome.trained.predictions):
        tracking.log_document(handle, f"logs/rank-{index}.txt", Path(path).with_name("log.txt"))


def log_model(outcome: Outcome, handle: RunHandle) -> None:
    """Log the trained model."""
    assert outcome.trained.weights is not None
    weights = Path(outcome.trained.weights)
    facts = build_model_facts(outcome.config, outcome.prepared, sha256_of(weights))
    registry.log_model(handle, facts, weights)


def _metrics(outcome: Outcome, summary: dict[str, Any]) -> dict[str, float | None]:
    trained, evaluated = outcome.trained, outcome.evaluated
    metrics = (
        stage_metrics(trained, evaluated)
        | judged_metrics(outcome)
        | speedup_metrics(outcome.speedup)
        | {
            Metric.PREPARE_SECONDS: outcome.prepared.seconds,
            Metric.WALL_SECONDS: summary["seconds"],
            Metric.TEST_ANGLE_RMSE: evaluated.angle_rmse_degrees,
            Metric.TEST_PSNR: evaluated.psnr_db,
            Metric.TEST_NOISY_PSNR: evaluated.noisy_psnr_db,
            Metric.NUM_REJECTED: outcome.prepared.num_rejected,
        }
        | recovery_metrics(trained)
    )
    metrics |= outcome.prepared.reads.metrics
    return metrics | {Metric.test(f"top_{k}_accuracy"): value for k, value in evaluated.top_k.items()}


def _tags(outcome: Outcome, handle: RunHandle) -> dict[str, str]:
    tags = speedup_tags(outcome.speedup, handle.run_id) | outcome.tags | {Tag.DATASET: outcome.prepared.fingerprint}
    if outcome.pretrained is not None:
        tags[Tag.PRETRAINED] = outcome.pretrained.summary
    if outcome.config.execution.worker_load == "measured":
        loads = outcome.trained.worker_load
        shares = "even" if loads is None else ":".join(f"{load / sum(loads):.2f}" for load in loads)
        tags.setdefault("paceline.auto.worker_load", f"{shares}: speeds of the ranks, timed before training")
    return tags
