"""Results of a run and their record: the summary of `--json`, and everything in MLflow."""

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline.conf.config import Config
from paceline.flows.lifecycle.mlflow_views import log_report
from paceline.flows.run.evidence import log_evidence
from paceline.flows.run.metrics import is_disturbed, recovery_metrics, speedup_metrics, speedup_tags, training_metrics
from paceline.tasks.files import sha256_of
from paceline.tasks.fingerprint import code_fingerprint, series_fingerprint
from paceline.tasks.model_bundle import build_model_facts
from paceline.tasks.names import Artifact, Metric, Tag
from paceline.tasks.records.data import PreparedSet, Pretrained
from paceline.tasks.records.execution import Plan
from paceline.tasks.records.hardware import Hardware
from paceline.tasks.records.measurement import FurtherStarts
from paceline.tasks.records.training import EvaluateResult, TrainResult
from paceline.tasks.report.quality_charts import quality_figures
from paceline.tasks.report.run_report import ReportInput, draw_speed, render_report
from paceline.tasks.speedup.comparability import comparison_facts, module_facts
from paceline.tasks.speedup.limit_share import SHARES, LimitShare, limit_share
from paceline.tasks.speedup.nights.regression import RegressionVerdict
from paceline.tasks.speedup.records import SpeedupResult
from paceline.tasks.speedup.steady_state import steady_rate
from paceline.tasks.track import registry
from paceline.tasks.track import run as tracking
from paceline.tasks.track.environment import describe_environment, package_versions
from paceline.tasks.track.rebuild import package_commits
from paceline.tasks.track.run import RunHandle

TRAIN_KEYS = (
    *("world_size", "num_epochs", "num_steps", "seconds", "samples_per_second", "final_loss", "checkpoint"),
    *("resumed_from", "data_wait_fraction", "wall_seconds", "clock_difference", "restarts", "compile"),
    *("cost", "limit", "energy"),
)
DATASET_KEYS = (
    *("fingerprint", "num_train", "num_validation", "num_test", "num_rejected"),
    *("reused", "seconds", "storage", "stored_size"),
)
JUDGED = (
    *(Metric.THROUGHPUT, Metric.STEADY_THROUGHPUT, Metric.DATA_WAIT_FRACTION),
    *(Metric.TEST_ACCURACY, Metric.TEST_SCORE),
)


@dataclass(frozen=True)
class Outcome:
    """Results of the stages of a run, and the verdicts on them."""

    config: Config
    plan: Plan
    prepared: PreparedSet
    trained: TrainResult
    evaluated: EvaluateResult
    workload: str
    hardware: Hardware
    pretrained: Pretrained | None = None  # initial weights; None for those of the seed
    speedup: SpeedupResult = field(default_factory=SpeedupResult)
    starts: FurtherStarts = field(default_factory=FurtherStarts)  # probes in further processes
    earlier: tuple[float, ...] = ()  # ratios of earlier starts that `speedup` borrows the variance from
    prediction: dict[str, Any] | None = None  # the forecast for this run, and its error
    judgement: RegressionVerdict | None = None  # comparison with earlier runs; None if it is off
    registered: dict[str, Any] | None = None
    """Name, version, alias and gate of the model in the registry; None without track.register."""

    @cached_property
    def series(self) -> str:
        """Fingerprint of the runs to compare with."""
        devices = f"{self.plan.device_name}, {self.hardware.num_cores} cores"
        return series_fingerprint(self.config, devices, self.prepared.class_names)

    @property
    def hosts(self) -> str:
        """Names of the hosts that trained."""
        return ", ".join(sorted(set(self.trained.hosts)))

    @property
    def is_disturbed(self) -> bool:
        """Whether the machine disturbed the training."""
        return is_disturbed(self.trained)

    @cached_property
    def share(self) -> LimitShare:
        """Share of the device's limit that the training reached."""
        return limit_share(self.trained)

    @cached_property
    def facts(self) -> dict[str, str]:
        """Facts that decide whether two runs are comparable."""
        return run_comparison_facts(self.config, self.prepared, self.plan, self.pretrained)


def run_comparison_facts(
    config: Config,
    prepared: PreparedSet | None,
    plan: Plan,
    pretrained: Pretrained | None,
    same_work: Collection[str] = (),
) -> dict[str, str]:
    """Settings, data, weights, code, versions and devices, see `comparability`; of own Lightning code without a set."""
    if prepared is None:
        return module_facts(config, code_fingerprint(), package_versions(), plan, same_work)
    return comparison_facts(config, prepared.fingerprint, code_fingerprint(), package_versions(), plan, pretrained)


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


def judged_metrics(outcome: Outcome) -> dict[str, float]:
    """Known metrics that later runs are compared by (`paceline.flows.run.history`)."""
    trained, speedup = outcome.trained, outcome.speedup
    metrics = stage_metrics(trained, outcome.evaluated)
    names = (*JUDGED, Metric.test(outcome.evaluated.score_name), *map(Metric.seconds, trained.time_budget))
    judged = {name: metrics[name] for name in names}
    # a baseline's rate from another day or machine would mislead
    judged[Metric.BASELINE_THROUGHPUT] = None if speedup.baseline_runs else speedup.baseline_samples_per_second
    judged[Metric.FOREIGN_CORES] = trained.validity.foreign_load if trained.validity else None
    return {name: value for name, value in judged.items() if value is not None}


def stage_metrics(trained: TrainResult, evaluated: EvaluateResult) -> dict[str, float | None]:
    """Metrics of a training and its evaluation, also inside a study or a sweep."""
    return training_metrics(trained) | {
        Metric.PREDICTION_THROUGHPUT: evaluated.samples_per_second,
        Metric.TEST_ACCURACY: evaluated.accuracy,
        Metric.test(evaluated.score_name): evaluated.score,
        Metric.TEST_SCORE: evaluated.score,
        Metric.TRAIN_FINAL_LOSS: trained.final_loss,
    }


def _tags(outcome: Outcome, handle: RunHandle) -> dict[str, str]:
    tags = speedup_tags(outcome.speedup, handle.run_id) | {
        Tag.DATASET: outcome.prepared.fingerprint,
        Tag.SERIES: outcome.series,
        Tag.HOSTS: outcome.hosts,
        Tag.DISTURBED: str(outcome.is_disturbed),
    }
    if outcome.pretrained is not None:
        tags[Tag.PRETRAINED] = outcome.pretrained.summary
    if outcome.judgement is not None:
        tags |= {Tag.REGRESSION: outcome.judgement.tag, Tag.REGRESSION_TEXT: outcome.judgement.text}
    if outcome.config.execution.worker_load == "measured":
        loads = outcome.trained.worker_load
        shares = "even" if loads is None else ":".join(f"{load / sum(loads):.2f}" for load in loads)
        tags["paceline.auto.worker_load"] = f"{shares}: speeds of the ranks, timed before training"
    return tags | {f"paceline.auto.{name}": f"{c.value}: {c.reason}" for name, c in outcome.plan.reasons.items()}
