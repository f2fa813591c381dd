"""Results of the stages of a run, and the verdicts on them."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from paceline.conf.config import Config
from paceline.tasks.fingerprint import code_fingerprint, series_fingerprint
from paceline.tasks.measure.records import FurtherStarts
from paceline.tasks.measure.validity import judge
from paceline.tasks.records.data import PreparedSet, Pretrained
from paceline.tasks.records.execution import Plan
from paceline.tasks.records.hardware import Hardware
from paceline.tasks.records.training import EvaluateResult, TrainResult
from paceline.tasks.speedup.comparability import comparison_facts
from paceline.tasks.speedup.limit_share import LimitShare, limit_share
from paceline.tasks.speedup.nights.regression import RegressionVerdict
from paceline.tasks.speedup.records import SpeedupResult
from paceline.tasks.track.environment import package_versions


@dataclass(frozen=True)
class Outcome:
    """Results of the stages."""

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
        """Whether the machine disturbed the training; busy cores do not count, `regression` compares them."""
        validity = self.trained.validity
        return validity is not None and judge(validity.model_copy(update={"foreign_load": None})).contaminated is True

    @cached_property
    def share(self) -> LimitShare:
        """Share of the device's limit that the training reached."""
        return limit_share(self.trained)

    @cached_property
    def facts(self) -> dict[str, str]:
        """Facts that decide whether two runs are comparable."""
        return run_comparison_facts(self.config, self.prepared, self.plan, self.pretrained)


@dataclass(frozen=True)
class Verdicts:
    """Verdicts on an outcome."""

    prediction: dict[str, Any] | None  # the forecast for this run, and its error
    judgement: RegressionVerdict | None  # comparison with earlier runs; None if it is off
    registered: dict[str, Any] | None
    """Name, version, alias and gate of the model in the registry; None without track.register."""


def run_comparison_facts(
    config: Config, prepared: PreparedSet, plan: Plan, pretrained: Pretrained | None
) -> dict[str, str]:
    """Settings, data, weights, code, versions and devices, see `comparability.comparison_facts`."""
    return comparison_facts(config, prepared.fingerprint, code_fingerprint(), package_versions(), plan, pretrained)
