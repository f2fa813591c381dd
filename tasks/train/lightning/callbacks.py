"""Lightning callbacks of a user's training: time budget, throughput, losses and checkpoints."""

import json
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, Timer
from torch import distributed

from paceline.tasks.errors import one_line
from paceline.tasks.names import Metric
from paceline.tasks.records.record import Choice
from paceline.tasks.records.training import STEP_ITEMS
from paceline.tasks.train.checkpoint_interval import CheckpointInterval, FailureHistory
from paceline.tasks.train.lightning.feed import FeedState, Position, StartEpoch
from paceline.tasks.train.lightning.step_parts import (
    StepParts,
    count_units,
    loss_value,
    num_samples,
    require_end,
    require_loss,
)
from paceline.tasks.train.rank.callbacks import MAX_LOG_STEPS, LogMetrics, Window, write_atomically, writer_of
from paceline.tasks.train.rank.checkpoint import checkpoint_path
from paceline.tasks.train.rank.process_group import broadcast
from paceline.tasks.train.rank.time_budget import Stopwatch
from paceline.tasks.train.rank.user_callbacks import KeptModels, call_epoch_start_hooks, run_or_end

UNSAFE = re.compile(r"GLOBAL (\S+) was not an allowed global")  # of torch 2.13
UNREADABLE = (
    "a restart cannot read the checkpoints ({}): keep only tensors and plain values in them; look at "
    "on_save_checkpoint and save_hyperparameters"
)
SEVERAL = "the training reads several loaders at once: checkpoints are saved at the ends of epochs only"
RELOADS = "the training resumed with a new loader: with reload_dataloaders_every_n_epochs above 1, batches may differ"
WORKERS = "the training resumed with new persistent_workers: augmentations in them differ from those without a stop"


class StepAccount(StepParts):
    """Accounts each step to the time budget, and counts samples and other units.

    On a GPU each window waits for the device once. `choices` are the values of `auto` with reasons, including the
    checkpoint interval once it is known; `reports` are texts that the flow logs with the next progress.
    """

    def __init__(
        self,
        stopwatch: Stopwatch,
        state: FeedState,
        log: LogMetrics | None,
        progress: Path | None,
        choices: dict[str, Choice],
        reports: Sequence[str] = (),
    ) -> None:
        super().__init__(stopwatch)
        self._state, self._log, self._progress = state, log, progress
        self._ended: dict[str, Any] | None = None  # number and metrics of the newest epoch that has ended
        self.choices, self._reports = choices, reports
        self.losses: list[float] = []
        """Losses of this rank's steps, earlier attempts included; NaN for a step that returned none."""
        self.windows: list[Window] = []
        self.window_samples: list[int] = []
        self._has_trained = False  # whether a batch that is not None has ended
        self.knows_samples = True
        """Whether the samples of all windows are known."""
        self.num_units: Counter[str] = Counter()
        """Other units of all batches, over all ranks."""
        self.startup_seconds: float | None = None
        self.fit_seconds = self._fit_started = 0.0
        self.num_saved_epochs = 0
        self.notes: list[str] = []
        self.epoch_ends: list[float] = []
        self._pending: list[torch.Tensor] = []
        self._num_samples: float = 0
        self._counts: tuple[float, dict[str, float | torch.Tensor]] = 0.0, {}  # samples and units of the batch
        self._window_units: Counter[str] = Counter()
        self._window = (0, 0.0)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._state.is_training = lambda: trainer.training
        self._state.reloads = _settings(trainer).reload_dataloaders_every_n_epochs == 1
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
        self._counts = num_samples(batch), count_units(pl_module, batch)  # now: the step may change the batch
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        samples, units = self._counts
        self._counts = 0.0, {}  # of a batch that is None: Lightning trains none, and calls this hook alone
        self._num_samples += samples  # not before: a hook may skip the batch
        self._window_units.update(units)
        if batch is not None and not self._has_trained:
            require_loss(pl_module, outputs)
            self._has_trained = True
        loss = loss_value(outputs)
        self._pending.append(torch.tensor(math.nan) if loss is None else loss)
        if _position(trainer) % _log_steps(trainer) == 0:
            self.close_window(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.close_window(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.close_window(trainer)
        self.fit_seconds = time.monotonic() - self._fit_started
        self.stopwatch.switch("teardown")

    def wait_for_device(self, trainer: Trainer) -> None:
        """Wait until a GPU has finished its steps, so that a clock shows their pace."""
        device = trainer.strategy.root_device
        if device.type == "cuda":
            with self.stopwatch.during("device"):
                torch.cuda.synchronize(device)

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
        self.knows_samples &= math.isfinite(samples)
        self.window_samples.append(int(samples) if math.isfinite(samples) else 0)
        counts = {unit: float(number) * trainer.world_size for unit, number in self._window_units.items()}
        self.num_units.update(counts)
        if self._log is not None and seconds > 0:
            rates = {Metric.train_rate(unit): number / seconds for unit, number in counts.items()}
            rates |= {Metric.TRAIN_THROUGHPUT: samples / seconds} if samples > 0 else {}
            self._log(rates, _position(trainer))
        self.write_progress(trainer)
        self._open_window(trainer)

    def note(self, text: str) -> None:
        """Note what the user should know of this training; the flow warns of it with the next progress."""
        if text not in self.notes:
            self.notes.append(text)

    def write_progress(self, trainer: Trainer, *, ends_epoch: bool = False) -> None:
        """Replace the progress file, which the flow shows; on all ranks, as the mean of an epoch is that of all."""
        metrics = metrics_of(trainer)["metrics"]
        if self._progress is None:
            return
        self._ended = {"epoch": trainer.current_epoch, "metrics": metrics} if ends_epoch else self._ended
        num_batches = trainer.num_training_batches
        facts = {
            "step": _position(trainer),
            "num_steps": int(num_batches * (trainer.max_epochs or 1)) if math.isfinite(num_batches) else None,
            "ended_epoch": self._ended,
            "epochs_kept": self.num_saved_epochs,
            "metrics": metrics,
            "notes": self.notes,
            "reports": list(self._reports),
            "choices": {name: choice.model_dump(mode="json") for name, choice in self.choices.items()},
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

    At the end of epochs and of the training, and inside an epoch after every so many batches. With `auto`, rank 0
    decides by a `CheckpointInterval` for all ranks whether a checkpoint is due, also at the end of an epoch. Not before
    a validation that is due, nor between the batches of one update: Lightning resumes there without them.

    It comes after the user's ModelCheckpoint, whose state it saves, and inside an epoch after the module's own
    `on_train_batch_end`, which may change weights or buffers.
    """

    def __init__(
        self,
        account: StepAccount,
        state: FeedState,
        directory: Path,
        every: int | Literal["auto"] | None,
        rank: int,
        read_failures: Callable[[], FailureHistory],
        world_size: int = 1,
        *,
        is_restart: bool = True,
    ) -> None:
        self._account, self._state, self._directory, self._every, self._rank = account, state, directory, every, rank
        self._is_restart = is_restart  # of the same training, not one that starts from another's checkpoint
        self._read_failures, self._world_size = read_failures, world_size
        self._unused = ModelCheckpoint(dirpath=directory)
        self.last: Path | None = None
        self._kept, self._num_kept = KeptModels(directory / "kept_models.txt"), 0
        self._kept_states: dict[str, dict[str, Any]] = {}  # at the checkpoint that the training resumed from
        self._saved: dict[str, Any] = {}
        self._resume: Position | None = None
        self._metrics: dict[str, Any] = {}
        self._interval: CheckpointInterval | None = None
        self._next_step = 0  # next batch after which a checkpoint may be due; the same on all ranks
        self._is_due = self._saves_ends_only = self._has_run = False
        self._should_stop: bool | None = None  # of the trainer at the checkpoint; None without one
        self._num_trained_to_save = 0  # of the epoch's batches, if a checkpoint is saved at the end of this batch
        self._num_held = 0  # batches of the epoch in the last checkpoint; 0 at its end
        self._is_checked = rank != 0  # whether the first checkpoint was read again

    @property
    def state_key(self) -> str:
        return "paceline"

    @property
    def best_model_path(self) -> str:
        """Path of the newest checkpoint, as of the ModelCheckpoint that Lightning adds where the user has none."""
        return str(self.last or "")

    def __getattr__(self, name: str) -> Any:
        """Other attributes, such as `dirpath`, are those of an unused ModelCheckpoint, which Lightning would have."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._unused, name)

    def state_dict(self) -> dict[str, Any]:
        return self._saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        positions = state_dict.get("positions", [])
        if len(positions) == self._world_size:  # else a run of other ranks has saved it: it resumes as in Lightning
            self._state.resume = self._resume = Position(**positions[self._rank])
            self._metrics = (state_dict.get("metrics") or [{}] * self._world_size)[self._rank]
        self._account.losses = list(state_dict.get("losses", []))
        self._should_stop, self._num_kept = bool(state_dict.get("should_stop")), state_dict.get("num_kept", 0)
        self._kept_states = state_dict.get("kept_states", {})

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._state.call_epoch_start_hooks = partial(call_epoch_start_hooks, trainer)
        settings = _settings(trainer)
        others = [each for each in settings.callbacks if each is not self]
        settings.callbacks = [StartEpoch(self._state), *others, self]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loop: Any = trainer.fit_loop
        connector = _settings(trainer)._logger_connector
        if not self._has_run:  # the user's code may fit again
            loop.run = partial(self._run, trainer, loop.run)
            connector.on_batch_end = partial(self._end_batch, trainer, connector.on_batch_end)

    def _run(self, trainer: Trainer, run: Callable[[], None]) -> None:
        """Run the training loop, once all states are restored: with shared weights, that follows `on_fit_start`.

        Lightning 2.6 compares its counts of batches to notice that a checkpoint was saved at the end of one. It does
        not count a batch as started that a hook has skipped, so that the counts are set here.
        """
        loop: Any = trainer.fit_loop
        self._has_run, loop.run = True, run
        if self._resume is not None and self._resume.num_trained:
            total = loop.epoch_loop.batch_progress.total
            total.started, total.processed, total.completed = total.ready, total.ready, total.ready - 1
        is_restart = self._is_restart and self._should_stop is not None
        kept = (self._num_kept, self._kept_states) if is_restart else (0, {})
        self._kept.restore(trainer, *kept)
        writer_of(trainer).before_user_checkpoint = partial(self._kept.note, trainer)
        if is_restart:
            trainer.should_stop = bool(self._should_stop)
            run_or_end(trainer, run)
        else:
            run()

    def _end_batch(self, trainer: Trainer, end: Callable[[], None]) -> None:
        """Let Lightning end a batch, which it does after the hooks of callbacks and of the module; then save."""
        end()
        if not trainer.training:  # in a validation that the module runs itself
            return
        number, self._num_trained_to_save = self._num_trained_to_save, 0
        if number and not _stops(trainer):  # else the end of the epoch follows, which saves
            self._save(trainer, number)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the interval, and after a resume do what Lightning 2.6 does not.

        It would train one more batch of an epoch that has ended, with `max_steps`. And it would leave out
        ReduceLROnPlateau, whose step follows the checkpoint, and which it does not step at the end of a resumed epoch.
        """
        if self._every == "auto":
            clock, end = (_log_steps(trainer), _position(trainer), time.monotonic()), partial(_epoch_end, trainer)
            self._interval = CheckpointInterval(end, *clock, self._read_failures, trainer.world_size)
            self._next_step = _position(trainer) + 1
        if self._state.has_new_workers:
            self._account.note(WORKERS)
        resume, self._resume = self._resume, None
        if resume is None:
            return
        loop, progress = trainer.fit_loop, trainer.fit_loop.epoch_progress
        if _settings(trainer).reload_dataloaders_every_n_epochs > 1:
            self._account.note(RELOADS)
        loop._restarting = False  # of the epochs alone
        trainer.callback_metrics.update(self._metrics)
        if not resume.num_trained:
            progress.current.completed = progress.current.ready - 1  # as at the checkpoint
        monitors = {each.monitor for each in trainer.lr_scheduler_configs if each.reduce_on_plateau}
        if monitors <= self._metrics.keys():
            interval = "step" if resume.num_trained else "epoch"
            loop.epoch_loop.update_lr_schedulers(interval, update_plateau_schedulers=True)
        if resume.num_trained:
            return
        loop.epoch_loop.restarting = loop._resuming_from_checkpoint = False  # so that it starts the loaders again
        loop.reset_restart_stage()
        loop.epoch_loop.reset_restart_stage()
        progress.current.completed, progress.total.completed = progress.current.ready, progress.total.ready

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        writer_of(trainer).release()  # Lightning has logged the metrics of the epoch before

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        writer_of(trainer).release()  # and those of the step before

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._num_trained_to_save = 0  # a hook of the batch before may have ended the epoch
        position, number = _position(trainer), trainer.fit_loop.batch_idx + 1  # a `dataloader_iter` has its own index
        self._kept.note(trainer)
        self._check_written(trainer)
        if self._saves_ends_only or self._every is None:
            return
        if self._every != "auto":
            self._is_due |= position % self._every == 0
        elif not self._is_due:
            self._is_due = self._interval_is_over(trainer)
        every = trainer.val_check_batch or math.inf  # counted within the epoch, or over all
        validates = 0 in (number % every, position % every)
        is_last = trainer.fit_loop.epoch_loop._num_ready_batches_reached()
        if self._is_due and not validates and not is_last and number % trainer.accumulate_grad_batches == 0:
            if len(self._state.feeds()) > 1:
                self._account.note(SEVERAL)
                self._saves_ends_only = True
                return
            self._num_trained_to_save = number

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._kept.note(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._kept.note(trainer)
        is_last = _stops(trainer) or trainer.current_epoch + 1 == trainer.max_epochs
        is_last |= trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps
        if is_last or self._interval is None or self._is_due or self._interval_is_over(trainer):
            self._save(trainer, 0, is_last=is_last)
            self._account.num_saved_epochs = trainer.current_epoch + 1
        if trainer.fit_loop.epoch_loop.batch_idx + 1 >= trainer.num_training_batches:
            self._account.epoch_ends.append(self._account.stopwatch.seconds_without("probe"))
        self._account.write_progress(trainer, ends_epoch=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write a checkpoint that is held, unless its last step has failed before Lightning logged it."""
        if trainer.fit_loop.epoch_loop.batch_progress.current.completed >= self._num_held:
            writer_of(trainer).release()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._kept.note(trainer)
        writer_of(trainer).wait()  # not every strategy ends its writer
        self._check_written(trainer)

    def _interval_is_over(self, trainer: Trainer) -> bool:
        position = _position(trainer)
        if self._interval is None or position < self._next_step:
            return False
        self._account.wait_for_device(trainer)
        self._next_step = int(broadcast(self._interval.next_step(position, time.monotonic())))
        return self._next_step <= position

    def _check_written(self, trainer: Trainer) -> None:
        """Note, once, that a restart could not read the checkpoints. Raises OSError: the last one cannot be written."""
        if not writer_of(trainer).is_idle() or self._is_checked or self.last is None:
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

    def _save(self, trainer: Trainer, num_trained: int, *, is_last: bool = False) -> None:
        position, writer = _position(trainer), writer_of(trainer)
        self._account.wait_for_device(trainer)
        self._account.close_window(trainer)
        started, path = time.monotonic(), checkpoint_path(self._directory, position)
        with self._account.stopwatch.during("checkpoint"):
            values = {name: value.cpu().as_subclass(torch.Tensor) for name, value in trainer.callback_metrics.items()}
            ranks: list[Any] = [(asdict(self._state.position(num_trained)), values)]
            if distributed.is_initialized():
                gathered: list[Any] = [None] * trainer.world_size
                distributed.all_gather_object(gathered, ranks[0])
                ranks = gathered
            positions, metrics = map(list, zip(*ranks, strict=True))
            self._saved = {"positions": positions, "losses": self._account.losses, "metrics": metrics}
            self._saved |= {"should_stop": bool(trainer.should_stop), "num_kept": self._kept.number}
            self._saved["kept_states"] = self._kept.states(trainer)
            writer.hold()
            self._num_held = num_trained
            trainer.save_checkpoint(path)
            self._saved = {}  # checkpoints of the user's code are at other places
        self._is_due, self.last = False, path
        if self._interval is not None and not is_last:
            now = time.monotonic()
            due = self._interval.record_checkpoint(position, now - started, now, writer.write_seconds)
            self._next_step = int(broadcast(due))
            if self._interval.choice is not None:
                self._account.choices["checkpoint_steps"] = self._interval.choice
            self._account.write_progress(trainer)


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


def _stops(trainer: Trainer) -> bool:
    """Whether a stop that was asked for ends the training now, after `min_epochs` and `min_steps`."""
    return bool(trainer.should_stop and trainer.fit_loop._can_stop_early)


def _log_steps(trainer: Trainer) -> int:
    """Batches between two reads of the loss, which wait for the device."""
    return _settings(trainer).log_every_n_steps or MAX_LOG_STEPS  # 0: the module logs nothing


def _epoch_end(trainer: Trainer, position: int) -> int:
    """The first position from this one on at which an epoch ends, if all are as long as the present one."""
    number = trainer.num_training_batches
    return math.ceil(position / number) * int(number) if math.isfinite(number) else sys.maxsize
