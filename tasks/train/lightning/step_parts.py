"""The parts of a training step in Lightning's loop, what a batch holds, and what a module must not do."""

import errno
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.data import extract_batch_size

from paceline.tasks.disk_space import require_space
from paceline.tasks.errors import InputError, RunError, one_line
from paceline.tasks.train.rank.checkpoint import NUM_CHECKPOINTS
from paceline.tasks.train.rank.time_budget import Stopwatch
from paceline.tasks.train.rank_spec import RankSpec

UNITS = "paceline.units"
"""Key of a batch with a number for each unit in it."""
NEVER_WRITTEN = errno.EACCES, errno.EPERM, errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EROFS
"""Errors of a folder that a later try does not change."""
SAME_KEY = re.compile(r"Found more than one stateful callback of type `(\w+)`")  # of Lightning 2.6


class StepParts(Callback):
    """Accounts forward, backward and optimizer to a stopwatch; of manual optimization only whole steps.

    The loader accounts `data_wait` itself, see `feed`. Between the steps the item is `loop`. On a GPU the host runs
    ahead of the device: its items are launches.
    """

    def __init__(self, stopwatch: Stopwatch) -> None:
        self.stopwatch = stopwatch
        self._before_validation = "setup"

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.stopwatch.switch("forward" if pl_module.automatic_optimization else "step")

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        if pl_module.automatic_optimization:
            self.stopwatch.switch("backward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if pl_module.automatic_optimization:
            self.stopwatch.switch("optimizer")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.stopwatch.switch("loop")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._before_validation = self.stopwatch.switch("validation")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.stopwatch.switch(self._before_validation)


class RequireOneScaler(Callback):
    """Refuses fp16 for a module with a gradient scaler of its own: Lightning's would scale the scaled loss again.

    The gradients would overflow, and the first steps would leave the weights as they are. Raises RunError there.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.precision != "16-mixed":
            return
        for part in pl_module.modules():
            for name, value in vars(part).items():
                if isinstance(value, torch.amp.GradScaler) and value.is_enabled():
                    fault = f"{type(part).__name__}.{name} scales the loss, which 16-mixed does too"
                    raise RunError(fault, hint="use execution.precision=32-true, or remove the scaler of the module")


class RequireSpace(Callback):
    """Refuses a training whose checkpoints would fill the disk, on rank 0, in the first update of an arm or of the fit.

    It counts what is there at once: the newest checkpoints, the one that is being written, and two copies of the final
    weights. Raises InputError there. A resumed training has its checkpoints already.
    """

    def __init__(self, spec: RankSpec) -> None:
        self._limits, self._home = spec.config.limits, Path(spec.home)
        self._num_weights = NUM_CHECKPOINTS + 1 + (2 if spec.config.lightning.code is None else 0)
        self._is_needed = spec.rank == 0 and spec.resume_from is None
        self.reports: list[str] = []
        """Free space and need as text, once they are known."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._is_needed or trainer.global_step == 0:
            return
        self._is_needed = False
        states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
        num_bytes = self._num_weights * _num_bytes(pl_module.state_dict())
        num_bytes += (NUM_CHECKPOINTS + 1) * sum(map(_num_bytes, states))
        self.reports.append(require_space(self._limits, self._home, {"checkpoints": num_bytes}))


class RequireFolders(Callback):
    """Refuses a ModelCheckpoint whose `dirpath` cannot be written, on rank 0, before the first step.

    Raises InputError there.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for each in trainer.checkpoint_callbacks if trainer.is_global_zero else ():
            if isinstance(each, ModelCheckpoint) and (each.save_top_k != 0 or each.save_last) and each.dirpath:
                _require_folder(str(each.dirpath), type(each).__name__)


def _require_folder(dirpath: str, owner: str) -> None:
    """Make the folder. Raises InputError: it cannot be made or written."""
    if "://" in dirpath:
        return
    try:
        Path(dirpath).mkdir(parents=True, exist_ok=True)
        reason = None if os.access(dirpath, os.W_OK | os.X_OK) else "no permission to write"
    except OSError as error:
        if error.errno not in NEVER_WRITTEN:
            raise
        reason = error.strerror
    if reason is not None:
        fault = f"dirpath={dirpath} of {owner} cannot be written ({reason})"
        raise InputError(fault, hint="give a folder that you can write, or remove dirpath", setting="dirpath")


@contextmanager
def final_refusals() -> Iterator[None]:
    """Raise InputError for what Lightning refuses in the body: it would refuse it again after a restart."""
    try:
        yield
    except MisconfigurationException as error:
        fault, _, advice = one_line(error).partition(" HINT: ")
        is_of_metric = "monitor" in fault
        hint = "log this metric with self.log, or monitor one that is logged" if is_of_metric else advice
        raise InputError(fault, hint=hint or "change what the message names, in the settings or in the code") from error
    except RuntimeError as error:
        if (found := SAME_KEY.search(str(error))) is None:
            raise
        fault = f"two callbacks of type {found[1]} save their state under one state_key"
        hint = "give them different settings, such as monitor or every_n_epochs, or remove one of them"
        raise InputError(fault, hint=hint, setting="trainer.callbacks") from error


def num_samples(batch: Any) -> float:
    """Samples of a batch, the size of its first tensor; NaN where it has none."""
    try:
        return extract_batch_size(batch)
    except (MisconfigurationException, RecursionError):
        return math.nan


def count_units(module: LightningModule, batch: Any) -> dict[str, float | torch.Tensor]:
    """The other units of a batch, such as tokens. A number in a tensor stays there: reading it waits for a GPU.

    `paceline.units` of the module is a mapping from a unit to a function of the batch, or to a key of the batch whose
    elements count. Without it, a batch may have the key `paceline.units`, with numbers by unit.

    Raises InputError: a unit cannot be counted.
    """
    declared = getattr(module, "paceline", None)
    rules = (declared.get("units") if isinstance(declared, Mapping) else getattr(declared, "units", None)) or {}
    if not rules and isinstance(batch, Mapping):
        rules = batch.get(UNITS) or {}
    counts: dict[str, float | torch.Tensor] = {}
    for unit, rule in rules.items():
        try:
            if not str(unit).isidentifier():
                raise ValueError("a unit is a word")  # and a part of the names of metrics
            value = rule(batch) if callable(rule) else batch[rule] if isinstance(rule, str) else rule
            if isinstance(value, torch.Tensor) and not isinstance(rule, str):
                counts[unit] = value.detach().to(torch.float64, copy=True).reshape(())
            else:
                counts[unit] = float(value.numel() if isinstance(value, torch.Tensor) else value)
        except Exception as error:
            fault = f"{unit} of a batch cannot be counted: {type(error).__name__}: {error}"
            raise InputError(fault, hint=f"give a key of the batch, or a function, as {UNITS} of the module") from error
    return counts


def loss_value(outputs: Any) -> torch.Tensor | None:
    """The loss, detached, in what Lightning makes of a training step's result; None where it is not one number."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    return loss.detach() if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None


def require_loss(module: LightningModule, outputs: Any) -> None:
    """Raise InputError: the training step returned None, which Lightning would skip."""
    if module.automatic_optimization and loss_value(outputs) is None:
        name = type(module).__name__
        raise InputError(f"training_step of {name} returned None", hint=f"return the loss from {name}.training_step")


def require_end(*, has_end: bool) -> None:
    """Raise InputError unless a training on a loader without length has a limit of steps or of time."""
    if not has_end:
        raise InputError(
            "the training loader has no length, so that an epoch may never end",
            hint="give trainer.max_steps, or a number of batches as trainer.limit_train_batches",
            setting="trainer.max_steps",
        )


def _num_bytes(tensors: dict[str, Any]) -> int:
    return sum(value.nbytes for value in tensors.values() if isinstance(value, torch.Tensor))
