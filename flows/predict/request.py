"""What a prediction is asked for, and the place for its files."""

import json
import os
from pathlib import Path
from typing import Any

from paceline.conf.config import Config
from paceline.conf.environment import Environment
from paceline.conf.section import Section, Text
from paceline.tasks.disk_space import require_space
from paceline.tasks.errors import InputError
from paceline.tasks.files import nearest_existing, write_durably
from paceline.tasks.names import PREDICTIONS_FILE

UNRECORDED = "%s is a directory, which no run of MLflow records; its digest is %s"
"""Warning about a model."""


class PredictRequest(Section):
    """Parameters of a prediction."""

    model: Text
    """`runs:/RUN_ID/model`, `models:/NAME@ALIAS`, a run's id, or a directory."""
    source: Text | None = None
    """A folder or URL of images, signals or clips, or a preset, whose test split is predicted; None for a model of own
    Lightning code, which has its own data."""
    overrides: tuple[Text, ...] = ()
    """Settings of data, execution and cluster, as key=value; for own Lightning code also those of LightningCLI."""
    layer: Text | None = None
    """A layer of the model, whose output is written in place of the predictions."""
    own_size: bool = False
    """Predict each image at its own size; for models that predict pixels."""
    out: Text | None = None
    """Directory for the Parquet files; None for a directory under PACELINE_HOME."""

    @property
    def subject(self) -> str:
        """What it is named after."""
        return self.source or self.model


def check_out(request: PredictRequest, out: Path, key: str) -> None:
    """Raise InputError: the files cannot go there, or there are those of a prediction with another key.

    The key is empty for own Lightning code, whose predictions are never reused.
    """
    try:
        before = json.loads((out / PREDICTIONS_FILE).read_text(encoding="utf-8"))["key"]
    except FileNotFoundError:
        if out.is_dir() and any(out.iterdir()):
            raise InputError(f"--out {request.out}: holds other files; give an empty or a new directory") from None
        place = nearest_existing(out)
        if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
            raise InputError(f"--out {out}: cannot be written; give a directory of yours") from None
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"--out {out}: {PREDICTIONS_FILE} cannot be read ({error}); give another directory") from error
    if before != key and any(out.glob("part-*.parquet")):
        of_another = "of another model, source, precision, layer or size"
        fault = (
            f"--out {out}: holds predictions {of_another if key else 'already, which own Lightning code never reuses'}"
        )
        raise InputError(f"{fault}; give another directory or remove it")


def require_room(config: Config, out: Path, environment: Environment) -> None:
    """Raise InputError: the disk of the files or of PACELINE_HOME has no space left to start with."""
    require_space(config.limits, environment.root, {})
    require_space(config.limits, out, {}, named="--out")


def write_facts(out: Path, facts: dict[str, Any], *, is_complete: bool) -> None:
    """Write the file that describes the prediction next to its parts, and says whether it has all of them."""
    write_durably(out / PREDICTIONS_FILE, json.dumps({**facts, "is_complete": is_complete}, indent=2).encode())
