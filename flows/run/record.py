"""Puts the outcome of a run together: the summary of the contract, and everything that MLflow keeps of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.flows.lifecycle.report_artifacts import log_report
from paceline.flows.run.outcome import Outcome, Verdicts
from paceline.tasks.files import sha256_of
from paceline.tasks.model_bundle import FACTS, WEIGHTS, describe_trained, digest_of
from paceline.tasks.records import TrainResult
from paceline.tasks.redact import redact
from paceline.tasks.report.quality_charts import quality_figures
from paceline.tasks.report.run_charts import draw_speed
from paceline.tasks.report.run_report import ReportInput, render_report
from paceline.tasks.speedup.steady_state import steady_rate
from paceline.tasks.speedup.verdict import break_even_steps
from paceline.tasks.track import run as tracking
from paceline.tasks.track.environment import describe_environment
from paceline.tasks.track.models import DIGEST_TAG
from paceline.tasks.track.registry import DATASET_TAG, MODEL, describe_model
from paceline.tasks.track.run import RunHandle

TRAIN_KEYS = (
    "world_size",
    "num_epochs",
    "num_steps",
    "seconds",
    "samples_per_second",
    "final_loss",
    "checkpoint",
    "resumed_from",
    "data_wait_fraction",
    "wall_seconds",
    "restarts",
)
DATASET_KEYS = (
    "fingerprint",
    "num_train",
    "num_validation",
    "num_test",
    "num_rejected",
    "reused",
    "seconds",
)


def summarise(outcome: Outcome, verdicts: Verdicts, handle: RunHandle, view: str, seconds: float) -> dict[str, Any]:
    """The JSON of `paceline run`; names and shape are the public contract."""
    return {
        "run_id": handle.run_id,
        "experiment": handle.experiment,
        "tracking_uri": redact(handle.tracking_uri),
        "workload": outcome.workload,
        "dataset": {key: getattr(outcome.prepared, key) for key in DATASET_KEYS},
        "pretrained": outcome.pretrained and outcome.pretrained.model_dump(mode="json"),
        "train": outcome.trained.model_dump(mode="json", include={*TRAIN_KEYS, "compile"}),
        "evaluate": outcome.evaluated.model_dump(mode="json"),
        "speedup": outcome.speedup.model_dump(mode="json"),
        "prediction": verdicts.prediction,
        "regression": verdicts.judgement and verdicts.judgement.model_dump(mode="json"),
        "registered": verdicts.registered,
        "view": view,
        "time_budget": outcome.trained.time_budget,
        "execution": outcome.plan.model_dump(mode="json"),
        "seconds": seconds,
    }


def record(outcome: Outcome, verdicts: Verdicts, handle: RunHandle, summary: dict[str, Any]) -> None:
    """Log metrics, tags, the report, its pictures and the files behind them to the MLflow run."""
    tracking.log_facts(handle, _metrics(outcome, summary), _tags(outcome, verdicts, handle))
    environment = describe_environment(outcome.trained.hosts, outcome.trained.devices)
    environment["packages"] = [package.identity for package in outcome.config.packages]
    signal = outcome.config.data.used_signal
    quality = quality_figures(outcome.evaluated, outcome.trained, outcome.prepared, signal.axes if signal else None)
    report = ReportInput(
        summary=summary,
        config=outcome.config,
        plan=outcome.plan,
        prepared=outcome.prepared,
        train=outcome.trained,
        speedup=outcome.speedup,
        evaluate=outcome.evaluated,
        figures=quality,
        environment=environment,
    )
    figures = draw_speed(outcome.speedup, outcome.trained, outcome.trained.time_budget)
    log_report(handle, render_report(report), figures | quality)
    tracking.log_document(handle, "summary.json", summary)
    tracking.log_document(handle, "environment.json", environment)
    tracking.log_document(handle, tracking.FACTS_ARTIFACT, outcome.facts)
    _log_files(outcome, handle)


def log_model(outcome: Outcome, handle: RunHandle) -> None:
    """Log the trained model: what it is, its weights, and its signature for MLflow."""
    assert outcome.trained.weights is not None
    weights = Path(outcome.trained.weights)
    facts = describe_trained(outcome.config, outcome.prepared, sha256_of(weights))
    tracking.log_document(handle, f"{MODEL}/{FACTS}", facts.model_dump_json(indent=2).encode())
    tracking.log_document(handle, f"{MODEL}/{WEIGHTS}", weights)
    tracking.log_document(handle, f"{MODEL}/MLmodel", describe_model(handle, facts))
    tracking.set_tags(handle, {DIGEST_TAG: digest_of(facts)})


def _metrics(outcome: Outcome, summary: dict[str, Any]) -> dict[str, float | None]:
    trained, evaluated, speedup = outcome.trained, outcome.evaluated, outcome.speedup
    metrics = judged_metrics(outcome) | {
        "speedup/ratio": speedup.ratio,
        "speedup/low": speedup.low,
        "speedup/high": speedup.high,
        "speedup/efficiency": speedup.efficiency,
        "throughput/prediction_samples_per_second": evaluated.samples_per_second,
        "time/communication_fraction": trained.communication_fraction,
        "time/idle_fraction": trained.idle_fraction,
        "memory/peak_bytes": trained.peak_memory_bytes,
        "energy/joules": trained.energy_joules,
        "time/prepare_seconds": outcome.prepared.seconds,
        "time/wall_seconds": summary["seconds"],
        "test/angle_rmse_degrees": evaluated.angle_rmse_degrees,
        "test/psnr_db": evaluated.psnr_db,
        "test/noisy_psnr_db": evaluated.noisy_psnr_db,
        "train/final_loss": trained.final_loss,
        "data/num_rejected": outcome.prepared.num_rejected,
        "recovery/num_restarts": len(trained.restarts),
        "recovery/lost_steps": sum(restart.lost_steps for restart in trained.restarts),
    }
    metrics |= {f"speedup/share_{name}": share[0] for name, share in speedup.shares.items()}
    metrics |= compile_metrics(trained)
    metrics |= outcome.prepared.reads.metrics
    return metrics | {f"test/top_{k}_accuracy": value for k, value in evaluated.top_k.items()}


def judged_metrics(outcome: Outcome) -> dict[str, float | None]:
    """Those that later runs are judged by (`paceline.flows.run.history`)."""
    trained, earlier = outcome.trained, outcome.speedup.baseline_runs
    metrics: dict[str, float | None] = {
        "throughput/samples_per_second": trained.samples_per_second,
        "throughput/steady_samples_per_second": steady_rate(trained),
        # of this machine on this day, or of no use to those who judge by it
        "throughput/baseline_samples_per_second": None if earlier else outcome.speedup.baseline_samples_per_second,
        "time/data_wait_fraction": trained.data_wait_fraction,
        "test/accuracy": outcome.evaluated.accuracy,
        f"test/{outcome.evaluated.score_name}": outcome.evaluated.score,
        "test/score": outcome.evaluated.score,
        "machine/foreign_cores": trained.validity.foreign_load if trained.validity else None,
    }
    return metrics | {f"time/{item}_seconds": seconds for item, seconds in trained.time_budget.items()}


def compile_metrics(trained: TrainResult) -> dict[str, float | None]:
    """What compiling did and cost; nothing for an eager network."""
    if trained.compile is None:
        return {}
    stats = trained.compile
    return {
        "compile/hit_rate": stats.hit_rate,
        "compile/num_graphs": stats.num_graphs,
        "compile/seconds": stats.seconds,
        "compile/break_even_steps": break_even_steps(trained),
    }


def _tags(outcome: Outcome, verdicts: Verdicts, handle: RunHandle) -> dict[str, str]:
    usable = outcome.speedup.ratio is not None and not outcome.speedup.contaminated
    tags = {
        "paceline.verdict": outcome.speedup.verdict,
        "paceline.baseline": outcome.speedup.baseline or "none",
        # The probe's baseline is an arm of this very run; a contaminated one is nobody's baseline.
        "paceline.baseline_run_id": next(iter(outcome.speedup.baseline_runs), handle.run_id) if usable else "",
        DATASET_TAG: outcome.prepared.fingerprint,
        tracking.SERIES_TAG: outcome.series,
        tracking.DISTURBED_TAG: str(outcome.disturbed),
        "paceline.contaminated": str(outcome.speedup.contaminated),
        "paceline.contamination": "; ".join(outcome.speedup.validity.reasons) if outcome.speedup.validity else "",
    }
    if outcome.pretrained is not None:
        tags["paceline.pretrained"] = outcome.pretrained.told
    if verdicts.judgement is not None:
        tags |= {
            tracking.REGRESSION_TAG: verdicts.judgement.tag,
            "paceline.regression_text": verdicts.judgement.text,
        }
    if outcome.config.execution.worker_load == "measured":
        loads = outcome.trained.worker_load
        shares = "even" if loads is None else ":".join(f"{load / sum(loads):.2f}" for load in loads)
        tags["paceline.auto.worker_load"] = f"{shares}: speeds of the ranks, timed before training"
    return tags | {f"paceline.auto.{name}": f"{c.value}: {c.reason}" for name, c in outcome.plan.reasons.items()}


def _log_files(outcome: Outcome, handle: RunHandle) -> None:
    rejected = Path(outcome.prepared.path) / "rejected.jsonl"
    if outcome.prepared.num_rejected:
        tracking.log_document(handle, "rejected.jsonl", rejected)
    for index, path in enumerate(outcome.trained.predictions):
        tracking.log_document(handle, f"logs/rank-{index}.txt", Path(path).with_name("log.txt"))
