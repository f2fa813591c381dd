"""Plans of studies: what to compare on which preset, by name or as a YAML file."""

from pathlib import Path
from typing import Self

import yaml
from pydantic import Field, field_validator, model_validator

from paceline.conf.credentials import Text
from paceline.conf.hints import did_you_mean, fault_and_hint, suggest
from paceline.conf.load import ConfigError, find_yaml, validate_as
from paceline.conf.section import Section

PLANS = Path(__file__).parent / "plans"


class PlanArm(Section):
    """An arm that does work of its own."""

    overrides: list[Text] = Field(default_factory=list)
    """Settings that differ from what the arms share, as key=value."""
    linear_eval: Text | None = None
    """Layer of the frozen network on whose output a classifier is fitted; None trains the network."""


class StudyPlan(Section):
    """A study to repeat on other data or machines, with either axes or arms."""

    preset: str
    """Name or path of the preset."""
    overrides: list[str] = Field(default_factory=list)
    """Settings that differ from the preset's, as key=value."""
    axes: dict[str, list[str]] = Field(default_factory=dict)
    """Setting -> its values, the baseline's first."""
    arms: dict[str, PlanArm] = Field(default_factory=dict)
    """Name -> arm; arms that do different work are compared by the time to the same score."""
    ladder: bool = False
    """Add one factor at a time."""
    repeats: int = Field(default=3, ge=1)
    """Trainings of each arm."""

    @model_validator(mode="after")
    def _has_axes_or_arms(self) -> Self:
        if bool(self.axes) == bool(self.arms):
            raise ValueError("a plan has either axes or arms")
        return self

    @field_validator("axes", mode="before")
    @classmethod
    def _as_text(cls, axes: object) -> object:
        if not isinstance(axes, dict):
            return axes
        return {
            field: [str(value) for value in values] if isinstance(values, list) else values
            for field, values in axes.items()
        }


def plan_names() -> list[str]:
    """Names of the shipped plans."""
    return sorted(path.stem for path in PLANS.glob("*.yaml"))


def load_plan(name: str) -> StudyPlan:
    """Read a plan by name or path; raise ConfigError if there is no such plan."""
    path = find_yaml(PLANS, name)
    if path is None:
        near = did_you_mean(suggest(name, plan_names()), f"choices: {', '.join(plan_names())}, or a YAML file")
        raise ConfigError(f"--plan {name} is not a plan or a file", hint=near, setting="--plan")
    try:
        return validate_as(StudyPlan, yaml.safe_load(path.read_text(encoding="utf-8")), options=False)
    except (yaml.YAMLError, UnicodeDecodeError, OSError, ConfigError) as error:
        raise ConfigError(
            f"--plan {path} is not a plan ({' '.join(fault_and_hint(error)[0].split())})",
            hint="compare it with conf/plans/scaling.yaml",
            setting="--plan",
        ) from error
