"""Results of a run and their record: the summary of `--json`, and everything in MLflow."""

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline.conf.config import Config
from paceline.conf.lightning import Objective
from paceline.flows.lifecycle.mlflow_views import log_report
from paceline.flows.run.evidence import log_evidence
from paceline.flows.run.metrics import is_disturbed, recovery_metrics, speedup_metrics, speedup_tags, training_metrics
from paceline.tasks.files import sha256_of
from paceline.tasks.fingerprint import code_fingerprint, series_fingerprint
from paceline.tasks.model_bundle import build_model_facts
from paceline.tasks.names import Artifact, Metric, Tag, metric_name
from paceline.tasks.records.data import PreparedSet, Pretrained
from paceline.tasks.records.execution import Plan
from paceline.tasks.records.hardware import Hardware
from paceline.tasks.records.measurement import FurtherStarts
from paceline.tasks.records.training import EvaluateResult, ModuleResult, ScoreName, Trained, TrainResult
from paceline.tasks.report.quality_charts import quality_figures
from paceline.tasks.report.run_report import ReportInput, draw_speed, render_report
from paceline.tasks.scores import only_loss
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
    *("cost", "limit", "energy", "validity"),
)
DATASET_KEYS = (
    *("fingerprint", "num_train", "num_validation", "num_test", "num_rejected"),
    *("reused", "seconds", "storage", "stored_size"),
)
JUDGED = (
    *(Metric.THROUGHPUT, Metric.STEADY_THROUGHPUT, Metric.DATA_WAIT_FRACTION),
    *(Metric.TEST_ACCURACY, Metric.TEST_SCORE),
)


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """A training that is compared with earlier runs, and the verdicts on it."""

    config: Config
    plan: Plan
    prepared: PreparedSet | None = None  # None for own Lightning code
    trained: Trained
    workload: str
    hardware: Hardware
    pretrained: Pretrained | None = None  # initial weights; None for those of the seed
    speedup: SpeedupResult = field(default_factory=SpeedupResult)
    earlier: tuple[float, ...] = ()  # ratios of earlier starts that `speedup` borrows the variance from
    judgement: RegressionVerdict | None = None  # comparison with earlier runs; None if it is off

    @property
    def metrics(self) -> dict[str, float | None]:
        """Metrics of the training and its quality."""
        return training_metrics(self.trained)

    @property
    def score(self) -> ScoreName | Objective | None:
        """What its quality is judged by; None where nobody knows."""
        return None

    @property
    def score_metric(self) -> str:
        """The metric with that score."""
        return Metric.TEST_SCORE

    @cached_property
    def series(self) -> str:
        """Fingerprint of the runs to compare with."""
        devices = f"{self.plan.device_name}, {self.hardware.num_cores} cores"
        return series_fingerprint(self.config, devices, self.prepared.class_names if self.prepared else ())

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

    @property
    def tags(self) -> dict[str, str]:
        """Tags by which later runs find it and by which it was judged."""
        tags = {Tag.SERIES: self.series, Tag.HOSTS: self.hosts, Tag.DISTURBED: str(self.is_disturbed)}
        if self.judgement is not None:
            tags |= {Tag.REGRESSION: self.judgement.tag, Tag.REGRESSION_TEXT: self.judgement.text}
        return tags | {f"paceline.auto.{name}": f"{c.value}: {c.reason}" for name, c in self.plan.reasons.items()}


@dataclass(frozen=True, kw_only=True)
class Outcome(FinishedRun):
    """Results of the stages of a run, and the verdicts on them."""

    prepared: PreparedSet
    trained: TrainResult
    evaluated: EvaluateResult
    starts: FurtherStarts = field(default_factory=FurtherStarts)  # probes in further processes
    prediction: dict[str, Any] | None = None  # the forecast for this run, and its error
    registered: dict[str, Any] | None = None
    """Name, version, alias and gate of the model in the registry; None without track.register."""

    @property
    def metrics(self) -> dict[str, float | None]:
        """Metrics of the training and its evaluation."""
        return stage_metrics(self.trained, self.evaluated)

    @property
    def score(self) -> ScoreName:
        """What the task is judged by."""
        return self.evaluated.score_name


@dataclass(frozen=True, kw_only=True)
class ModuleOutcome(FinishedRun):
    """The training of own Lightning code."""

    trained: ModuleResult

    @property
    def metrics(self) -> dict[str, float | None]:
        """Metrics of the training, and those that the module has logged."""
        own = {metric_name(name): value for name, value in self.trained.metrics.items()}
        return {**training_metrics(self.trained), **own}

    @property
    def score(self) -> Objective | None:
        """The metric that `track` names, or else the only validation loss."""
        track, logged = self.config.track, (*self.trained.metrics, *self.trained.not_finite)
        if track.maximize is not None:
            return Objective(name=track.maximize, goal="maximize")
        return Objective(name=track.minimize, goal="minimize") if track.minimize is not None else only_loss(logged)

    @property
    def score_metric(self) -> str:
        """Its name in MLflow."""
        return metric_name(self.score.name) if self.score is not None else Metric.TEST_SCORE


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


def judged_metrics(outcome: FinishedRun) -> dict[str, float]:
    """Known metrics that later runs are compared by (`paceline.flows.run.history`)."""
    trained, speedup, metrics = outcome.trained, outcome.speedup, outcome.metrics
    scores = (outcome.score_metric, *([Metric.test(outcome.score)] if isinstance(outcome.score, str) else []))
    judged = {name: metrics.get(name) for name in (*JUDGED, *scores, *map(Metric.seconds, trained.time_budget))}
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
    tags = speedup_tags(outcome.speedup, handle.run_id) | outcome.tags | {Tag.DATASET: outcome.prepared.fingerprint}
    if outcome.pretrained is not None:
        tags[Tag.PRETRAINED] = outcome.pretrained.summary
    if outcome.config.execution.worker_load == "measured":
        loads = outcome.trained.worker_load
        shares = "even" if loads is None else ":".join(f"{load / sum(loads):.2f}" for load in loads)
        tags.setdefault("paceline.auto.worker_load", f"{shares}: speeds of the ranks, timed before training")
    return tags
