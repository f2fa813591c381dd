"""What the stages of a run have found, and what is made of it; plain, so that it can be told, judged and handed on."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from paceline.conf.config import Config
from paceline.tasks.fingerprint import code_fingerprint, series_fingerprint
from paceline.tasks.measure.validity import judge
from paceline.tasks.records import EvaluateResult, Hardware, Plan, PreparedSet, Pretrained, TrainResult
from paceline.tasks.speedup.comparability import comparison_facts
from paceline.tasks.speedup.records import SpeedupResult
from paceline.tasks.speedup.regression import RegressionVerdict
from paceline.tasks.track.environment import package_versions


@dataclass(frozen=True)
class Outcome:
    """What the stages found."""

    config: Config
    plan: Plan
    prepared: PreparedSet
    trained: TrainResult
    evaluated: EvaluateResult
    workload: str
    hardware: Hardware
    pretrained: Pretrained | None = None
    """Weights that it began with; None for those of the seed."""
    speedup: SpeedupResult = field(default_factory=SpeedupResult)

    @cached_property
    def series(self) -> str:
        """Fingerprint that a run shares with those it is judged by."""
        devices = f"{self.plan.device_name}, {self.hardware.num_cores} cores"
        return series_fingerprint(self.config, devices, self.prepared.class_names)

    @property
    def disturbed(self) -> bool:
        """Whether something disturbed the training, busy cores aside: those are judged by what is usual."""
        seen = self.trained.validity
        return seen is not None and judge(seen.model_copy(update={"foreign_load": None})).contaminated is True

    @cached_property
    def facts(self) -> dict[str, str]:
        """What a comparison with another run looks at."""
        return run_comparison_facts(self.config, self.prepared, self.plan, self.pretrained)


@dataclass(frozen=True)
class Verdicts:
    """What is made of an outcome."""

    prediction: dict[str, Any] | None
    """What had been predicted for it, and how that turned out."""
    judgement: RegressionVerdict | None
    """Against the runs before it; None where nobody looks."""
    registered: dict[str, Any] | None
    """Name, version, alias and gate of its model in the registry; None where it is not to be registered."""


def run_comparison_facts(
    config: Config, prepared: PreparedSet, plan: Plan, pretrained: Pretrained | None
) -> dict[str, str]:
    """Settings, data, weights, code, versions and devices, see `comparability.comparison_facts`."""
    return comparison_facts(config, prepared.fingerprint, code_fingerprint(), package_versions(), plan, pretrained)
