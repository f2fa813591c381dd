"""A module with metrics of all kinds, and a callback that writes how a training ended; nothing is from Paceline."""

from pathlib import Path

import lightning.pytorch as pl
import torch
from more_shapes import NUM_CLASSES, Perceptron
from torch.nn import functional
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy


class Measured(Perceptron):
    """Logs means of a rank, means over all ranks, and metrics as objects and as values, in training and validation."""

    def __init__(self, size: int = 8, width: int = 32, lr: float = 1e-2):
        super().__init__(size, width, lr)
        self.train_accuracy, self.train_mean, self.val_mean = (
            MulticlassAccuracy(NUM_CLASSES),
            MeanMetric(),
            MeanMetric(),
        )

    def training_step(self, batch, batch_idx):
        images, labels = batch
        logits = self.layers(images)
        loss = functional.cross_entropy(logits, labels)
        self.train_accuracy(logits, labels)
        self.train_mean.update(loss)
        self.log("train/accuracy", self.train_accuracy, on_step=True, on_epoch=True)
        self.log("train/loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("train/own", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self):
        self.log("train/mean", self.train_mean.compute())
        self.train_mean.reset()

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        loss = functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.val_mean.update(loss)
        self.log("val/own", loss)
        self.log("val/loss", loss, sync_dist=True)

    def on_validation_epoch_end(self):
        self.log("val/mean", self.val_mean.compute())
        self.val_mean.reset()


class FinalState(pl.Callback):
    """Writes the state of each rank at the end of the training."""

    def __init__(self, directory: str):
        self.directory = Path(directory)

    def on_fit_end(self, trainer, pl_module):
        progress = trainer.fit_loop.epoch_loop.batch_progress.total
        state = {
            "weights": pl_module.state_dict(),
            "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
            "progress": [trainer.current_epoch, trainer.global_step, progress.completed],
            "rates": [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups],
            "hyperparameters": dict(pl_module.hparams),
        }
        self.directory.mkdir(parents=True, exist_ok=True)
        torch.save(state, self.directory / f"rank-{trainer.global_rank}.pt")


class Threads(Perceptron):
    """Writes with how many threads each step computes."""

    def __init__(self, path: str, lr: float = 1e-2):
        super().__init__(lr=lr)
        self.path = path

    def training_step(self, batch, batch_idx):
        with Path(self.path).open("a") as file:
            print(torch.get_num_threads(), file=file)
        return super().training_step(batch, batch_idx)
