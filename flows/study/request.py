"""The parameters of a study, from the command, the form or the store."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from paceline.conf.config import Config
from paceline.conf.credentials import Text
from paceline.conf.load import PlanArm


class StudyRequest(BaseModel):
    """Parameters of a study."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    preset: Text
    """Name or path of the preset, for people."""
    config: Config
    """Settings that all arms share."""
    axes: dict[str, list[Text]] = {}
    """Setting -> its values, the baseline's first."""
    arms: dict[str, PlanArm] = {}
    """Instead of axes: from scratch, fine-tuned and features, which are compared by the time to the same score."""
    ladder: bool = False
    """Add one factor at a time instead of the full grid."""
    # The bounds are for Prefect's form; `check_study` and the command give better messages.
    repeats: int = Field(default=3, json_schema_extra={"minimum": 1})
    """Trainings of each arm."""
    target: float | None = Field(default=None, json_schema_extra={"exclusiveMinimum": 0, "maximum": 1})
    """Validation score (accuracy, mean IoU or SSIM) to which the time is measured; None for the lowest final score of a
    baseline run. With `arms`, None is the final accuracy of training from scratch in the same repeat."""
    gpu: Text = "L4"
    """With `arms`: GPU whose data sheet bounds unmeasured values."""

    @property
    def kind(self) -> Literal["study", "no-gpu"]:
        """Role of its run in MLflow."""
        return "no-gpu" if self.arms else "study"
