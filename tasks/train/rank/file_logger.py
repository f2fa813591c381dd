"""Lightning's logger of a user's training: metrics for MLflow, and files of what the user's code writes itself."""

import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.tensorboard import _TENSORBOARD_AVAILABLE, _TENSORBOARDX_AVAILABLE
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, utilities

from paceline.tasks.names import metric_name
from paceline.tasks.train.launch.layout import KEPT_FOLDER
from paceline.tasks.train.rank.callbacks import LogMetrics

RENAMED = "MLflow does not accept the metric name {}: the metric is {} there"


class FileLogger(Logger):
    """Lightning's logger of a rank: metrics go to MLflow under the names that the module gives them.

    A module that uses `experiment`, `log_dir` or `log_hyperparams` gets those of the logger that Lightning has by
    default.

    Args:
        log: Takes metrics; None to drop them.
        directory: For the files of that logger.
        run_id: Of MLflow.
        note: Takes a text for the user.
        save_dir: Directory above that of the files of a ModelCheckpoint, the same after a restart.
    """

    def __init__(
        self,
        log: LogMetrics | None,
        directory: Path,
        run_id: str,
        note: Callable[[str], None] | None = None,
        save_dir: Path | None = None,
    ) -> None:
        super().__init__()
        self._log, self._directory, self._run_id, self._note = log, directory, run_id, note
        self._save_dir = save_dir or directory
        self._default: TensorBoardLogger | CSVLogger | None = None
        self._is_written = False
        self.trained: Collection[str] = ()
        """Names of the training that a test does not write again."""

    def default(self) -> TensorBoardLogger | CSVLogger:
        """The logger of a Trainer without one, in the rank's directory."""
        if self._default is None:
            has_board = bool(_TENSORBOARD_AVAILABLE or _TENSORBOARDX_AVAILABLE)
            self._default = (TensorBoardLogger if has_board else CSVLogger)(self._directory)
        return self._default

    @property
    def experiment(self) -> Any:
        """What the module writes to directly, in files."""
        self._is_written = True
        return self.default().experiment

    @property
    def log_dir(self) -> str:
        """Directory of these files."""
        return self.default().log_dir

    def save(self) -> None:
        """Write what is left for these files."""
        if self._is_written:
            self.default().save()

    def finalize(self, status: str) -> None:
        """End these files."""
        if self._is_written:
            self.default().finalize(status)

    @property
    def name(self) -> str:
        return KEPT_FOLDER

    @property
    def version(self) -> str:
        return self._run_id

    @property
    def save_dir(self) -> str:
        return str(self._save_dir)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if self._log is None:
            return
        names = {name: metric_name(name) for name in metrics if name not in self.trained}
        self._log({stored: float(metrics[name]) for name, stored in names.items()}, step or 0)
        for name, stored in names.items():
            if name != stored and self._note is not None:
                self._note(RENAMED.format(name, stored))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Write what the user's code logs to these files; the flow has logged what Lightning gives at the start."""
        if sys._getframe(1).f_globals.get("__name__") != utilities.__name__:
            self._is_written = True
            self.default().log_hyperparams(params, *args, **kwargs)
