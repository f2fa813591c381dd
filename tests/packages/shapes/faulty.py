"""A module, a callback and a command line whose code fails on one rank alone; nothing is imported from Paceline."""

import builtins
import time
from pathlib import Path

import lightning.pytorch as pl
import more_shapes
import torch
from lightning.pytorch.cli import LightningCLI
from torch import distributed
from torch.nn import functional

BOTH = -1


class Perceptron(more_shapes.Perceptron):
    """Raises an error at a place on one rank, or on both; where the other one waits for it in a collective."""

    def __init__(self, place: str = "", rank: int = 1, error: str = "FileNotFoundError", lr: float = 1e-2):
        super().__init__(lr=lr)
        self.place, self.rank, self.error = place, rank, error

    def fail(self, place):
        rank = distributed.get_rank()
        if place == self.place and self.rank in (rank, BOTH):
            raise getattr(builtins, self.error)(f"{place}: a file of rank {rank} is not there")

    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            self.fail("training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        if self.current_epoch == self.trainer.max_epochs - 1:
            self.fail("validation_step")
        super().validation_step(batch, batch_idx)

    def test_step(self, batch, batch_idx):
        self.fail("test_step")
        self.log("test/loss", functional.cross_entropy(self.layers(batch[0]), batch[1]), sync_dist=True)

    def on_test_end(self):
        self.fail("on_test_end")
        distributed.barrier()


class Patient(Perceptron):
    """Rank 0 alone does something for long at the start of an epoch."""

    def __init__(self, seconds: float, lr: float = 1e-2):
        super().__init__(lr=lr)
        self.seconds = seconds

    def on_train_epoch_start(self):
        time.sleep(self.seconds if self.global_rank == 0 else 0)


class Scaled(more_shapes.Perceptron):
    """Scales its loss itself, as for fp16."""

    def __init__(self, lr: float = 1e-2):
        super().__init__(lr=lr)
        self.automatic_optimization = False
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(self.scaler.scale(loss))
        self.scaler.step(optimizer)
        self.scaler.update()
        return loss


class Witness(pl.Callback):
    """Writes each error that Lightning reports into a file."""

    def on_exception(self, trainer, pl_module, exception):
        with (Path(trainer.default_root_dir) / "exceptions.txt").open("a") as file:
            print(f"{type(exception).__name__}: {exception}", file=file)


class FaultyCLI(LightningCLI):
    """Fails where its module says so."""

    def before_fit(self):
        self.model.fail("before_fit")

    def after_fit(self):
        self.model.fail("after_fit")
        if self.model.place == "after_fit":
            distributed.barrier()
