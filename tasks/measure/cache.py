"""Cache of measurements for later runs on the same hardware, below PACELINE_HOME."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import ValidationError

from paceline.tasks.files import write_durably
from paceline.tasks.records.record import Record

R = TypeVar("R", bound=Record)


class MeasurementCache(Generic[R]):
    """One measurement, in a file named after the facts that its value depends on."""

    def __init__(self, home: Path, facts: Mapping[str, object], kind: type[R]) -> None:
        key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
        self._path = home / "searches" / f"{key}.json"
        self._kind = kind

    def find(self) -> R | None:
        """The measurement of an earlier run; None without a readable one."""
        try:
            return self._kind.model_validate_json(self._path.read_text(encoding="utf-8"))
        except (OSError, ValidationError):
            return None

    def keep(self, result: R) -> None:
        """Save a measurement."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(self._path, result.model_dump_json().encode())
