"""The ledger of a study: one line per training, so that an interrupted study can resume."""

from pathlib import Path

from pydantic import ValidationError

from paceline.tasks.errors import InputError
from paceline.tasks.files import write_durably
from paceline.tasks.speedup.study.records import ArmRun


class Ledger:
    """Runs as JSON lines, each written before the next training. Raises InputError: lines of another version."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        try:
            runs = [ArmRun.model_validate_json(line) for line in lines]
        except ValidationError as error:
            raise InputError(
                f"{path}: trainings of another version; resume with that version, or start a new study"
            ) from error
        self._runs = {(run.arm, run.repeat): run for run in runs}

    def runs(self) -> tuple[ArmRun, ...]:
        """Every training, in the order in which they ran; of one that was repeated the last."""
        return tuple(sorted(self._runs.values(), key=lambda run: run.position))

    def has(self, arm: str, repeat: int) -> bool:
        """Whether that training is done; a failed one is tried again when a study is resumed."""
        run = self._runs.get((arm, repeat))
        return run is not None and run.status == "done"

    def add(self, run: ArmRun) -> None:
        """Note a training. The file is replaced as a whole, so no crash leaves half a line."""
        self._runs[run.arm, run.repeat] = run
        lines = (run.model_dump_json() + "\n" for run in self._runs.values())
        write_durably(self._path, "".join(lines).encode())
