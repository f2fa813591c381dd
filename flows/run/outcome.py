"""A finished training and the verdicts on it, and the metrics by which later runs are compared with it."""

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from paceline.conf.config import Config
from paceline.conf.lightning import Objective
from paceline.flows.run.metrics import is_disturbed, training_metrics
from paceline.tasks.fingerprint import code_fingerprint, series_fingerprint
from paceline.tasks.names import Metric, Tag, metric_name
from paceline.tasks.records.data import PreparedSet, Pretrained
from paceline.tasks.records.execution import Plan
from paceline.tasks.records.hardware import Hardware
from paceline.tasks.records.measurement import FurtherStarts
from paceline.tasks.records.training import EvaluateResult, ModuleResult, ScoreName, Trained, TrainResult
from paceline.tasks.scores import only_loss
from paceline.tasks.speedup.comparability import comparison_facts, module_facts
from paceline.tasks.speedup.limit_share import LimitShare, limit_share
from paceline.tasks.speedup.nights.regression import RegressionVerdict
from paceline.tasks.speedup.records import SpeedupResult
from paceline.tasks.track.environment import package_versions

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
