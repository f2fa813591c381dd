"""The callback for a Trainer of Lightning."""

import os
from contextlib import ExitStack
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from paceline.tasks.measure.step_marks import VARIABLE, step
from paceline.tasks.names import Status
from paceline.tasks.watch.account import Account
from paceline.tasks.watch.card import finish, status_of
from paceline.tasks.watch.hooks import follow
from paceline.tasks.watch.ranks import SEVERAL_RANKS
from paceline.tasks.watch.records import WatchResult


class SpeedAccount(Callback):
    """Accounts for the time of each step, and prints the cause of it and what removing it would gain.

    The losses stay the same bit for bit. The run is in MLflow, in the experiment `paceline-watch`.

    Args:
        replay: Measure what waiting for input costs: blocks of steps whose batches were read before. Set it to False if
            your data set changes with the training. It has no effect under `paceline judge`, for which each batch is
            a marked step.
    """

    def __init__(self, *, replay: bool = True) -> None:
        self.result: WatchResult | None = None
        """The account of the newest training; None before its end, and on other ranks than the first."""
        self._replay = replay
        self._hooks = ExitStack()
        self._account = Account()  # moved by nothing until a training starts

    def __reduce__(self) -> Any:
        """A copy in another process starts with an account of its own."""
        return partial(type(self), replay=self._replay), ()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Follow the loader, the backward passes and the optimizers from here on."""
        if stage != "fit" or not trainer.is_global_zero:
            return
        why = "" if self._replay else "replay=False"
        why = "under paceline judge" if VARIABLE in os.environ else why
        self._account = Account(
            why_not_measured=SEVERAL_RANKS if trainer.world_size > 1 else why,
            after_receive="transfer",
            is_training=lambda: trainer.training and not trainer.sanity_checking,
            num_ranks=trainer.world_size,
        )
        self._hooks.enter_context(follow(self._account))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """The batch is on the device."""
        self._account.switch("forward")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The rest of the step belongs to callbacks and loggers."""
        step()
        self._account.switch("rest")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A step with a validation does not count."""
        self._account.leave("validation")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What follows belongs to no step."""
        self._account.leave()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The end of an epoch belongs to no step."""
        self._account.leave()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Account for what was trained."""
        self._finish(pl_module, status_of(exception))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the card."""
        self._finish(pl_module, "FINISHED")

    def _finish(self, pl_module: LightningModule, status: Status) -> None:
        account, self._account = self._account, Account()
        self._hooks.close()
        self.result = finish(account, type(pl_module).__name__, status) or self.result
