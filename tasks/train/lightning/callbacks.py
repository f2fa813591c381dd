"""Lightning callbacks of a user's training: time budget, throughput, losses, checkpoints; and the logger for MLflow."""

import json
import math
import re
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.loggers.tensorboard import _TENSORBOARD_AVAILABLE, _TENSORBOARDX_AVAILABLE
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, Timer
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from torch import distributed

from paceline.tasks.errors import one_line
from paceline.tasks.names import Metric, metric_name
from paceline.tasks.records.training import STEP_ITEMS
from paceline.tasks.train.checkpoint_interval import MAX_SHARE, MIN_SECONDS
from paceline.tasks.train.lightning.feed import FeedState, Position
from paceline.tasks.train.lightning.step_parts import (
    StepParts,
    count_units,
    loss_value,
    num_samples,
    require_end,
    require_loss,
)
from paceline.tasks.train.rank.callbacks import LogMetrics, Window, write_atomically
from paceline.tasks.train.rank.checkpoint import checkpoint_path
from paceline.tasks.train.rank.checkpoint_io import AtomicCheckpointIO
from paceline.tasks.train.rank.process_group import broadcast
from paceline.tasks.train.rank.time_budget import Stopwatch

UNSAFE = re.compile(r"GLOBAL (\S+) was not an allowed global")  # of torch 2.13
UNREADABLE = (
    "a restart cannot read the checkpoints ({}): keep only tensors and plain values in them; look at "
    "on_save_checkpoint and save_hyperparameters"
)
SEVERAL = "the training reads several loaders at once: checkpoints are saved at the ends of epochs only"


class StepAccount(StepParts):
    """Accounts each step to the time budget, and counts samples and other units.

    On a GPU each window waits for the device once.
    """

    def __init__(self, stopwatch: Stopwatch, state: FeedState, log: LogMetrics | None, progress: Path | None) -> None:
        super().__init__(stopwatch)
        self._state, self._log, self._progress = state, log, progress
        self.losses: list[float] = []
        """Losses of this rank's steps, earlier attempts included; NaN for a step that returned none."""
        self.windows: list[Window] = []
        self.window_samples: list[int] = []
        self.num_units: Counter[str] = Counter()
        """Other units of all batches, over all ranks."""
        self.startup_seconds: float | None = None
        self.fit_seconds = 0.0
        self.num_saved_epochs = 0
        self._notes: list[str] = []
        self.epoch_ends: list[float] = []
        self._pending: list[torch.Tensor] = []
        self._num_samples: float = 0
        self._window_units: Counter[str] = Counter()
        self._window = (0, 0.0)
        self._fit_started = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._state.is_training = lambda: trainer.training
        self._state.training_loaders = lambda: trainer.train_dataloader
        self._state.num_started = lambda: trainer.fit_loop.epoch_loop.batch_progress.current.ready

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if math.isinf(trainer.num_training_batches) and trainer.max_steps == -1:
            timers = [callback for callback in _settings(trainer).callbacks if isinstance(callback, Timer)]
            require_end(has_end=bool(timers))  # of trainer.max_time
        self._fit_started = time.monotonic()
        self.stopwatch.switch("loop")
        self.startup_seconds = self.stopwatch.seconds_without("probe")
        self._open_window(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._num_samples += num_samples(batch)
        self._window_units.update(count_units(pl_module, batch))
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if not self.losses and not self._pending:
            require_loss(pl_module, outputs)
        loss = loss_value(outputs)
        self._pending.append(torch.tensor(math.nan) if loss is None else loss)
        if _position(trainer) % _settings(trainer).log_every_n_steps == 0:
            self.close_window(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.close_window(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.close_window(trainer)
        self.fit_seconds = time.monotonic() - self._fit_started
        self.stopwatch.switch("teardown")

    def close_window(self, trainer: Trainer) -> None:
        """Read the pending losses, and record the time and the samples since the last window."""
        if not self._pending:
            return
        with self.stopwatch.during("device" if self._pending[-1].is_cuda else "logging"):
            losses = [float(loss) for loss in self._pending]
        self._pending.clear()
        self.losses += losses
        first, before = self._window
        seconds = self._step_seconds() - before
        self.windows.append((first, len(losses), seconds))
        samples = self._num_samples * trainer.world_size  # Lightning's samplers give all ranks as many
        self.window_samples.append(int(samples) if math.isfinite(samples) else 0)
        counts = {unit: number * trainer.world_size for unit, number in self._window_units.items()}
        self.num_units.update(counts)
        if self._log is not None and seconds > 0:
            rates = {Metric.train_rate(unit): number / seconds for unit, number in counts.items()}
            rates |= {Metric.TRAIN_THROUGHPUT: samples / seconds} if samples > 0 else {}
            self._log(rates, _position(trainer))
        self.write_progress(trainer)
        self._open_window(trainer)

    def note(self, text: str) -> None:
        """Note what the user should know of this training; the flow logs it with the next progress."""
        if text not in self._notes:
            self._notes.append(text)

    def write_progress(self, trainer: Trainer) -> None:
        """Replace the progress file, which the flow shows."""
        if self._progress is None:
            return
        num_batches = trainer.num_training_batches
        facts = {
            "step": _position(trainer),
            "num_steps": int(num_batches * (trainer.max_epochs or 1)) if math.isfinite(num_batches) else None,
            "epoch": trainer.current_epoch,
            "num_epochs": trainer.max_epochs,
            "epochs_kept": self.num_saved_epochs,
            "metrics": metrics_of(trainer)["metrics"],
            "notes": self._notes,
        }
        with suppress(OSError):  # a progress file must not stop a training
            write_atomically(self._progress, json.dumps(facts))

    def _open_window(self, trainer: Trainer) -> None:
        self._window, self._num_samples = (_position(trainer), self._step_seconds()), 0
        self._window_units.clear()

    def _step_seconds(self) -> float:
        budget = self.stopwatch.budget()
        return sum(budget.get(item, 0.0) for item in ("data_wait", "step", *STEP_ITEMS))


class SaveCheckpoint(Checkpoint):
    """Saves Lightning's own checkpoints, with the position of each rank for an exact resume.

    At the end of epochs and of the training, and inside an epoch at `every_steps`; with `auto` when `MIN_SECONDS` have
    passed and checkpoints take at most `MAX_SHARE` of the time. Not before a validation that is due, nor between the
    batches of one update: Lightning resumes there without them.
    """

    def __init__(
        self, account: StepAccount, state: FeedState, directory: Path, every: int | Literal["auto"] | None, rank: int
    ) -> None:
        self._account, self._state, self._directory, self._every, self._rank = account, state, directory, every, rank
        self.last: Path | None = None
        self._saved: dict[str, Any] = {}
        self._ends_epoch = False
        self._next_save = time.monotonic() + MIN_SECONDS
        self._is_due = False
        self._is_checked = rank != 0  # whether the first checkpoint was read again

    @property
    def state_key(self) -> str:
        return "paceline"

    def state_dict(self) -> dict[str, Any]:
        return self._saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        positions = state_dict.get("positions", [])
        if self._rank < len(positions):
            self._state.resume = position = Position(**positions[self._rank])
            self._ends_epoch = not position.num_trained
        self._account.losses = list(state_dict.get("losses", []))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the next epoch after a checkpoint at the end of one, also with `max_steps`.

        There Lightning 2.6 would train one more batch of the epoch before.
        """
        if not self._ends_epoch:
            return
        loop = trainer.fit_loop
        loop.epoch_loop.restarting = False
        loop.reset_restart_stage()
        loop.epoch_loop.reset_restart_stage()
        progress = loop.epoch_progress
        progress.current.completed, progress.total.completed = progress.current.ready, progress.total.ready
        self._ends_epoch = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        position, number = _position(trainer), batch_idx + 1
        self._check_first(trainer)
        if self._every == "auto" and position % _settings(trainer).log_every_n_steps == 0:
            self._is_due = bool(broadcast(float(time.monotonic() > self._next_save)))
        elif isinstance(self._every, int):
            self._is_due |= position % self._every == 0
        every = trainer.val_check_batch or math.inf  # counted within the epoch, or over all
        validates = 0 in (number % every, position % every)
        is_last = number >= trainer.num_training_batches
        if self._is_due and not validates and not is_last and number % trainer.accumulate_grad_batches == 0:
            if len(self._state.feeds()) > 1:
                self._account.note(SEVERAL)
                return
            self._save(trainer, number)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        is_last = trainer.should_stop or trainer.current_epoch + 1 == trainer.max_epochs
        is_last |= trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps
        is_due = self._every != "auto" or bool(broadcast(float(time.monotonic() > self._next_save)))
        self._account.num_saved_epochs = trainer.current_epoch + 1
        if is_last or is_due:
            self._save(trainer, 0)
        if trainer.fit_loop.epoch_loop.batch_idx + 1 >= trainer.num_training_batches:
            self._account.epoch_ends.append(self._account.stopwatch.seconds_without("probe"))
        self._account.write_progress(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        writer = trainer.strategy.checkpoint_io
        if not self._is_checked and isinstance(writer, AtomicCheckpointIO):
            writer.wait()
            self._check_first(trainer)

    def _check_first(self, trainer: Trainer) -> None:
        """Note, once, that a restart could not read the checkpoints."""
        if self._is_checked or self.last is None:
            return
        writer = trainer.strategy.checkpoint_io
        if not (isinstance(writer, AtomicCheckpointIO) and writer.is_idle()):
            return
        self._is_checked = True
        try:
            torch.load(self.last, mmap=True, weights_only=True)
        except OSError:  # of a file system, for now
            return
        except Exception as error:  # noqa: BLE001  whatever torch raises for a content that it does not load
            found = UNSAFE.search(str(error))
            self._account.note(UNREADABLE.format(found[1] if found else one_line(error)[:200]))
            self._account.write_progress(trainer)

    def _save(self, trainer: Trainer, num_trained: int) -> None:
        started, path = time.monotonic(), checkpoint_path(self._directory, _position(trainer))
        self._account.close_window(trainer)
        with self._account.stopwatch.during("checkpoint"):
            positions: list[Any] = [asdict(self._state.position(num_trained))]
            if distributed.is_initialized():
                gathered: list[Any] = [None] * trainer.world_size
                distributed.all_gather_object(gathered, positions[0])
                positions = gathered
            self._saved = {"positions": positions, "losses": self._account.losses}
            trainer.save_checkpoint(path)
        cost = broadcast(time.monotonic() - started)
        self._next_save, self._is_due, self.last = time.monotonic() + max(MIN_SECONDS, cost / MAX_SHARE), False, path


class FileLogger(Logger):
    """Lightning's logger of a rank: metrics go to MLflow under the names that the module gives them.

    A module that uses `experiment` or `log_dir` gets those of the logger that Lightning has by default.

    Args:
        log: Takes metrics; None to drop them.
        directory: For the files of that logger.
        run_id: Of MLflow.
    """

    def __init__(self, log: LogMetrics | None, directory: Path, run_id: str) -> None:
        super().__init__()
        self._log, self._directory, self._run_id = log, directory, run_id
        self._default: TensorBoardLogger | CSVLogger | None = None
        self._is_written = False

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
        return "paceline"

    @property
    def version(self) -> str:
        return self._run_id

    @property
    def save_dir(self) -> str:
        return str(self._directory)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if self._log is not None:
            self._log({metric_name(name): float(value) for name, value in metrics.items()}, step or 0)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the flow has logged the configuration."""


def metrics_of(trainer: Trainer) -> dict[str, Any]:
    """The newest value of each metric that the module has logged, and the names of those that are not finite."""
    newest = {name: float(value) for name, value in trainer.callback_metrics.items()}
    finite = {name: value for name, value in newest.items() if math.isfinite(value)}
    return {"metrics": finite, "not_finite": tuple(name for name in newest if name not in finite)}


def _settings(trainer: Trainer) -> Any:
    """The trainer with the attributes that its connectors set, which its type does not show."""
    return trainer


def _position(trainer: Trainer) -> int:
    """Batches trained so far, over all epochs."""
    return trainer.fit_loop.total_batch_idx + 1
