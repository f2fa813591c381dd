"""The user's callbacks and hooks around a resume: what ModelCheckpoint keeps, and what an epoch's start sets."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    Callback,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities.model_helpers import is_overridden

from paceline.tasks.records.training import BestModel
from paceline.tasks.train.rank.callbacks import write_atomically

ENGINES = ("lightning", "pytorch_lightning", "paceline")
"""Packages with callbacks that are not the user's."""
UNSAVED = ("_last_checkpoint_saved", "_last_global_step_saved", "_defer_save_until_validation")
"""Attributes of ModelCheckpoint that decide what it saves next, and that its state lacks in Lightning 2.6."""
EPOCH_CALLBACKS = (GradientAccumulationScheduler, StochasticWeightAveraging)
"""Callbacks of Lightning that set something at the start of an epoch. Called twice, they set the same."""


def best_models(trainer: Trainer) -> tuple[BestModel, ...]:
    """The best model that each callback has kept, by the metric that it monitors, or else the newest one."""
    return tuple(
        BestModel(
            path=each.best_model_path,
            monitor=each.monitor,
            score=_finite(each.best_model_score),
        )
        for each in _callbacks(trainer)
        if each.best_model_path
    )


class KeptModels:
    """Which files the user's ModelCheckpoint callbacks have saved in this run, for a restart; on all ranks.

    The names are lines of a file, in their order. A checkpoint has their number, and what `states` returns.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._known: set[str] | None = None  # until `restore`, before which Lightning may validate
        self.number = 0
        """Of the names so far."""

    def note(self, trainer: Trainer) -> None:
        """Write down the names of new files, on rank 0 before they are written: a lost rank may leave a part of one."""
        known = self._known
        if known is None or known.issuperset(names := _names(trainer)):
            return
        new = [name for name in dict.fromkeys(names) if name not in known]
        known.update(new)
        self.number += len(new)
        if trainer.is_global_zero:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="utf-8") as file:
                file.writelines(f"{name}\n" for name in new)

    def states(self, trainer: Trainer) -> dict[str, dict[str, Any]]:
        """The attributes of each callback that Lightning does not save, by its `state_key`, with its `dirpath`."""
        names = ("dirpath", *UNSAVED)
        return {each.state_key: {name: getattr(each, name) for name in names} for each in _callbacks(trainer)}

    def restore(self, trainer: Trainer, number: int, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Let files and callbacks agree: remove files of steps that are repeated, and forget those that are gone.

        Else such a file would stay, and that of the repeated step would get another name. `number` is that of the
        names at the checkpoint, and `states` are those of the callbacks; 0 and none without a checkpoint.
        """
        text = self._file.read_text(encoding="utf-8") if trainer.is_global_zero and self._file.exists() else ""
        noted: list[str] = trainer.strategy.broadcast(text.splitlines())
        if trainer.is_global_zero and noted[number:]:
            write_atomically(self._file, "".join(f"{name}\n" for name in noted[:number]))
        self.number = min(number, len(noted))
        for name in noted[number:]:
            trainer.strategy.remove_checkpoint(name)
        self._known = {*noted[:number], *_names(trainer)}
        for each in _callbacks(trainer):
            _set_unsaved(each, states.get(each.state_key, {}), trainer)
            scores = each.best_k_models
            if not scores and each.best_model_path and not each.file_exists(each.best_model_path, trainer):
                each.best_model_path = ""  # the newest one, without a metric
            if removed := [path for path in scores if not each.file_exists(path, trainer)]:
                kept = {path: score for path, score in scores.items() if path not in removed}
                choose = min if each.mode == "min" else max
                each.best_k_models = kept
                best = choose(kept.items(), key=lambda item: float(item[1]), default=("", None))
                each.best_model_path, each.best_model_score = best


def run_or_end(trainer: Trainer, run: Callable[[], None]) -> None:
    """Run the training loop; of one that has ended before the restart, call the hooks of its start and of its end.

    Lightning 2.6 leaves them out. But they belong to a training whose last checkpoint is older than its end: a callback
    may put averaged weights into the module there, or a module may export itself.
    """
    loop = trainer.fit_loop
    loop.setup_data()
    if loop.done:
        loop.on_run_start()
        loop.on_run_end()
    else:
        run()


def call_epoch_start_hooks(trainer: Trainer) -> None:
    """Call `on_train_epoch_start` in a resume inside an epoch, which Lightning 2.6 leaves out.

    The hook may set what no checkpoint holds, such as the number of batches whose gradients are added up, or which
    layers learn. Therefore it is called on the module and on the user's callbacks. Those that save a state of their
    own in a checkpoint are left out, because the hook might reset what was restored. The state of the module and of
    the schedulers and the settings of the optimizers stay as restored, whatever the hooks do to them, and nothing is
    logged a second time.
    """
    module = trainer.lightning_module
    callbacks = [each for each in trainer.callbacks if _is_called_again(each)]  # type: ignore[attr-defined]  # a connector's
    saves_state = is_overridden("on_save_checkpoint", module, LightningModule)
    is_called = is_overridden("on_train_epoch_start", module, LightningModule) and not saves_state
    if not callbacks and not is_called:
        return
    state = deepcopy(module.state_dict())
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    settings = [deepcopy({name: value for name, value in group.items() if name != "params"}) for group in groups]
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    scheduled = [deepcopy(scheduler.state_dict()) for scheduler in schedulers]
    with _silent([module, *callbacks]):
        for callback in callbacks:
            callback.on_train_epoch_start(trainer, module)
        if is_called:
            module.on_train_epoch_start()
    module.load_state_dict(state, strict=False)
    for scheduler, state in zip(schedulers, scheduled, strict=True):
        scheduler.load_state_dict(state)
    for group, setting in zip(groups, settings, strict=True):
        group.update(setting)


def _is_called_again(callback: Callback) -> bool:
    """Whether the hook of a callback is called: one of `EPOCH_CALLBACKS`, or the user's that saves no state."""
    if isinstance(callback, EPOCH_CALLBACKS):
        return True
    origin = callback.on_train_epoch_start.__module__.partition(".")[0]  # of a LambdaCallback: the user's function
    saves_state = bool(callback.state_dict()) or is_overridden("on_save_checkpoint", callback, Callback)
    return origin not in ENGINES and not saves_state


@contextmanager
def _silent(owners: Iterable[object]) -> Iterator[None]:
    """Let `log` and `log_dict` of the module and the callbacks do nothing."""
    with ExitStack() as stack:
        for owner in owners:
            for name in ("log", "log_dict"):
                stack.enter_context(patch.object(owner, name, _log_nothing))
        yield


def _log_nothing(*args: Any, **options: Any) -> None:
    """Stand in for `log`."""


def _finite(score: torch.Tensor | None) -> float | None:
    """The score as a number; None for infinity, as which ModelCheckpoint keeps NaN, because JSON has neither."""
    return None if score is None or not math.isfinite(score) else float(score)


def _callbacks(trainer: Trainer) -> list[ModelCheckpoint]:
    return [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]


def _set_unsaved(callback: ModelCheckpoint, state: Mapping[str, Any], trainer: Trainer) -> None:
    """Set the attributes that Lightning does not save, unless the callback has another folder now."""
    if state.get("dirpath") != callback.dirpath:
        return
    for name in UNSAVED:
        setattr(callback, name, state[name])
    last = callback._last_checkpoint_saved
    if last and not callback.file_exists(last, trainer):
        callback._last_checkpoint_saved = ""


def _names(trainer: Trainer) -> list[str]:
    """The files that the callbacks have saved and still know."""
    each_of = ((*each.best_k_models, each.best_model_path, each.last_model_path) for each in _callbacks(trainer))
    return [name for names in each_of for name in names if name]
