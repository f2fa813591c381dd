"""Lightning callbacks of a fit: the time budget, loss curves, validation, checkpoints.

None of them makes the host wait for the device between log points. Their order in the Trainer matters: see `fit`.
"""

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, Trainer

from paceline.tasks.errors import RunError
from paceline.tasks.files import write_pieces
from paceline.tasks.model.batch import Batch, BatchSource
from paceline.tasks.model.objectives import Task
from paceline.tasks.names import Metric
from paceline.tasks.records.record import Choice
from paceline.tasks.train.checkpoint_interval import CheckpointInterval, FailureHistory
from paceline.tasks.train.rank.checkpoint import checkpoint_path
from paceline.tasks.train.rank.checkpoint_io import AtomicCheckpointIO
from paceline.tasks.train.rank.process_group import all_reduce, average_buffers, broadcast
from paceline.tasks.train.rank.time_budget import Stopwatch
from paceline.tasks.train.step.distributed import communication_fraction
from paceline.tasks.train.step.epoch_loop import StepLoop
from paceline.tasks.train.step.learner import Learner

MAX_LOG_STEPS = 50
LogMetrics = Callable[[dict[str, float], int], None]
Window = tuple[int, int, float]  # first step, number of steps, and seconds between two reads of the loss


class StepLoader:
    """The training loader for Lightning: starts at any step, and accounts waiting for input to the stopwatch."""

    def __init__(self, loader: BatchSource, stopwatch: Stopwatch, first_step: int) -> None:
        # Lightning neither rewinds a sampler inside an epoch nor reads an iterator past its last batch, so this object
        # holds the position.
        self._loader, self._stopwatch, self.next_step = loader, stopwatch, first_step

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        self._loader.seek(self.next_step)
        batches = iter(self._loader)
        while True:
            with self._stopwatch.during("data_wait"):
                batch = next(batches, None)
            if batch is None:
                return
            self.next_step += 1
            yield batch


@dataclass(eq=False)
class BudgetCallback(Callback):
    """Accounts the start and the end of the fit to the time budget. Must be the first callback.

    On a GPU the host runs ahead of the device, and waits for it in the item `device`, unless so many kernels are queued
    that a launch must wait: then in the item that launches.
    """

    stopwatch: Stopwatch
    fit_seconds: float = 0.0
    startup_seconds: float = 0.0  # process start to the first step, probe excluded
    communication_fraction: float | None = None
    """Share of the steps in which ranks exchanged gradients without computing."""
    _started: float = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._started = time.monotonic()
        self.stopwatch.switch("loop")
        self.startup_seconds = self.stopwatch.seconds_without("probe")

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.fit_seconds = time.monotonic() - self._started
        loop = trainer.fit_loop.epoch_loop
        passes_per_step = loop.passes_per_step if isinstance(loop, StepLoop) else 1.0
        self.communication_fraction = communication_fraction(trainer.strategy.model, passes_per_step)  # unwrapped after
        self.stopwatch.switch("teardown")


@dataclass(eq=False)
class ProgressCallback(Callback):
    """Reads the losses from the device in windows, and reports their means."""

    stopwatch: Stopwatch
    log_metrics: LogMetrics | None
    progress_path: Path | None
    choices: dict[str, Choice]  # the values of `auto` with reasons, including the checkpoint interval once it is known
    windows: list[Window] = field(default_factory=list)  # without those in which a CUDA graph was warmed up or captured
    num_saved_epochs: int = 0  # number of epochs in a checkpoint
    _newest: dict[str, float] = field(default_factory=dict)
    _num_warm_up_steps: int = 0
    _window_started: float = field(default_factory=time.monotonic)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.num_saved_epochs = len(pl_module.epoch_ends)
        self.restart_window()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.restart_window()

    def restart_window(self) -> None:
        """Exclude the time since the last window, such as validation and checkpoints, from the next one's rate."""
        self._window_started = time.monotonic()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Close a window every `log_steps` steps and at an epoch's end; the same steps on all ranks."""
        step, course = trainer.global_step, pl_module.course
        if step % log_steps(course.plan.steps_per_epoch) == 0 or course.ends_epoch(step):
            with self.stopwatch.during("logging"):
                self.close_window(trainer, pl_module)

    def close_window(self, trainer: Trainer, learner: Learner) -> None:
        """Copy the pending losses to the host and report their mean. Raises RunError: the loss is no longer finite."""
        if not learner.pending:
            return
        with wait_for_device(self.stopwatch, learner.pending[-1].device):
            window = all_reduce(torch.stack(learner.pending).double(), "mean").tolist()
        learner.pending.clear()
        bad = next((index for index, loss in enumerate(window) if not math.isfinite(loss)), None)
        if bad is not None:
            step = trainer.global_step - len(window) + bad + 1
            fault = f"train/loss is {window[bad]} at step {step} (learning rate {_learning_rate(trainer):g})"
            remedy = "use a lower recipe.learning_rate, more recipe.warmup_epochs or bf16 instead of fp16"
            raise RunError(f"{fault}: training diverged; {remedy}")
        learner.losses.extend(window)
        self._report(trainer, learner, window)

    def _report(self, trainer: Trainer, learner: Learner, window: list[float]) -> None:
        seconds = time.monotonic() - self._window_started  # the losses have been read, so the device has finished
        first_step, step = trainer.global_step - len(window), trainer.global_step
        loop = trainer.fit_loop.epoch_loop
        num_warm_up_steps = loop.num_warm_up_steps if isinstance(loop, StepLoop) else 0
        if num_warm_up_steps == self._num_warm_up_steps:
            self.windows.append((first_step, len(window), seconds))
        self._num_warm_up_steps = num_warm_up_steps
        self._newest = {
            Metric.TRAIN_LOSS: sum(window) / len(window),
            Metric.TRAIN_THROUGHPUT: (learner.course.samples(step) - learner.course.samples(first_step)) / seconds,
            Metric.TRAIN_LEARNING_RATE: _learning_rate(trainer),
            Metric.TRAIN_NUM_RANKS: trainer.world_size,
        }
        if self.log_metrics is not None:
            self.log_metrics(self._newest, step)
        self.write_progress(trainer, learner)
        self.restart_window()

    def write_progress(self, trainer: Trainer, learner: Learner) -> None:
        """Replace the progress file."""
        if self.progress_path is None:
            return
        facts = {
            "step": trainer.global_step,
            "num_steps": learner.course.num_steps(learner.recipe.num_epochs),
            "epoch": trainer.current_epoch,
            "num_epochs": learner.recipe.num_epochs,
            "epochs_kept": self.num_saved_epochs,
            "validation_score": learner.validation_scores[-1] if learner.validation_scores else None,
            "validation_scores": learner.validation_scores,
            "score_name": learner.task.score_name,
            "choices": {name: choice.model_dump(mode="json") for name, choice in self.choices.items()},
            **self._newest,
        }
        with suppress(OSError):  # a progress file must not stop a training
            write_atomically(self.progress_path, json.dumps(facts))


@dataclass(eq=False)
class ValidationCallback(Callback):
    """Measures the validation score at the end of each epoch, with every sample once on any number of ranks."""

    stopwatch: Stopwatch
    count: Callable[[], list[float]]
    task: Task
    log_metrics: LogMetrics | None

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        with self.stopwatch.during("validation"):
            counts = self.count()
        if not counts:
            return
        num_samples, *totals = counts
        score = self.task.score(totals, num_samples)
        pl_module.validation_scores.append(score)
        if self.log_metrics is not None:
            metrics = {Metric.validation(self.task.score_name): score, Metric.VALIDATION_LOSS: totals[0] / num_samples}
            self.log_metrics(metrics, trainer.global_step)


@dataclass(eq=False)
class CheckpointCallback(Callback):
    """Saves after the last step, at the end of each epoch, and every `every_steps` inside an epoch.

    With `auto`, rank 0 decides at a few steps for all ranks whether a checkpoint is due, also at the end of an epoch.
    """

    stopwatch: Stopwatch
    directory: Path
    every_steps: int | Literal["auto"] | None  # None for the end of epochs only; `auto` for a `CheckpointInterval`
    progress: ProgressCallback  # closes the loss window before a checkpoint, so that the saved curve is complete
    read_failures: Callable[[], FailureHistory]
    last: Path | None = None
    epoch_ends: list[float] = field(default_factory=list)
    """Seconds from process start to the end of each epoch, probe excluded."""
    _interval: CheckpointInterval | None = None
    _next_step: int = 0  # next step at which a checkpoint may be due; the same on all ranks
    _num_epochs: int = 0  # number of epochs in the newest checkpoint, which may not be written yet

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._num_epochs = len(pl_module.epoch_ends)
        if self.every_steps != "auto":
            return
        course, step = pl_module.course, trainer.global_step
        clock = (log_steps(course.plan.steps_per_epoch), step, time.monotonic())
        self._interval = CheckpointInterval(course.epoch_end, *clock, self.read_failures, trainer.world_size)
        self._next_step = step + 1

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._record_written(trainer)
        step, every = trainer.global_step, self.every_steps
        may_save = every == "auto" or (isinstance(every, int) and step % every == 0)
        if may_save and not pl_module.course.ends_epoch(step) and self._is_due(step, pl_module):
            self._save(trainer, pl_module)
            if self._interval is not None:
                self.progress.write_progress(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        step = trainer.global_step
        pl_module.epoch_ends.append(step)
        is_last = step == pl_module.course.num_steps(pl_module.recipe.num_epochs)
        if is_last or self._is_due(step, pl_module):
            self._save(trainer, pl_module)
        self.progress.write_progress(trainer, pl_module)  # the coordinator acts on saved epochs
        self.epoch_ends.append(self.stopwatch.seconds_without("probe"))

    def _is_due(self, step: int, learner: Learner) -> bool:
        """Whether the interval is over; always true without one."""
        if self._interval is None:
            return True
        if step < self._next_step:
            return False
        if learner.pending:
            with wait_for_device(self.stopwatch, learner.pending[-1].device):
                learner.pending[-1].item()  # the device's pace counts
        self._next_step = int(broadcast(self._interval.next_step(step, time.monotonic())))
        return self._next_step <= step

    def _save(self, trainer: Trainer, learner: Learner) -> None:
        step, writer = trainer.global_step, writer_of(trainer)
        with self.stopwatch.during("checkpoint"):
            self.progress.close_window(trainer, learner)
            started = time.monotonic()  # the device has finished its steps
            average = learner.average
            # A checkpoint holds one rank's buffers, for all.
            average_buffers(learner.network, average.buffers if average else ())
            self.last = checkpoint_path(self.directory, step)
            trainer.save_checkpoint(self.last)
            self._num_epochs = len(learner.epoch_ends)
            if step == learner.course.num_steps(learner.recipe.num_epochs):
                writer.wait()
            elif self._interval is not None:
                now = time.monotonic()
                due = self._interval.record_checkpoint(step, now - started, now, writer.write_seconds)
                self._next_step = int(broadcast(due))
                if self._interval.choice is not None:
                    self.progress.choices["checkpoint_steps"] = self._interval.choice
            self._record_written(trainer)
            self.progress.restart_window()

    def _record_written(self, trainer: Trainer) -> None:
        """Record that the newest checkpoint is written, if it is. Raises OSError: it cannot be."""
        if writer_of(trainer).is_idle():
            self.progress.num_saved_epochs = self._num_epochs


def writer_of(trainer: Trainer) -> AtomicCheckpointIO:
    """What writes the checkpoints of a trainer."""
    writer = trainer.strategy.checkpoint_io
    assert isinstance(writer, AtomicCheckpointIO)
    return writer


def log_steps(steps_per_epoch: int) -> int:
    """Steps between log points: about ten an epoch, between 5 and 50 steps apart."""
    return min(MAX_LOG_STEPS, max(5, steps_per_epoch // 10))


def wait_for_device(stopwatch: Stopwatch, device: torch.device) -> AbstractContextManager[None]:
    """Account a read of numbers to the item `device` on a GPU; on a CPU they are there."""
    return stopwatch.during("device") if device.type == "cuda" else nullcontext()


def write_atomically(path: Path, text: str) -> None:
    """Replace a small text file; a reader sees the old text or the new one, never a part."""
    write_pieces(path, (text.encode(),), durably=False)


def _learning_rate(trainer: Trainer) -> float:
    return float(trainer.optimizers[0].param_groups[0]["lr"])
