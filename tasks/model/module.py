"""The one LightningModule: it ties a network, its objective and its schedule together.

It does not know where batches come from, how many ranks there are, or where metrics go.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn

from conf.schema import Recipe
from tasks.model.objective import LabelledBatch, batch_loss, build_optimizer
from tasks.model.schedule import learning_rate_factor

STATE_KEY = "paceline"


class Learner(LightningModule):
    """Trains `network` by `recipe`.

    Args:
        network: maps images_NCHW to `(logits_NK, targets_NT or None)`.
        recipe: optimizer, schedule and loss.
        peak_learning_rate: after batch scaling.
        steps_per_epoch: of the training loader.
    """

    def __init__(self, network: nn.Module, recipe: Recipe, peak_learning_rate: float, steps_per_epoch: int) -> None:
        super().__init__()
        self.network = network
        self.recipe = recipe
        self.peak_learning_rate = peak_learning_rate
        self.steps_per_epoch = steps_per_epoch
        self.losses: list[float] = []
        """Loss of every step whose value has been read from the device; filled by the progress callback."""
        self.validation_accuracy: list[float] = []
        self.pending: list[torch.Tensor] = []
        """Losses still on the device: reading each would make the host wait in every step."""

    def training_step(self, batch: LabelledBatch, batch_idx: int) -> torch.Tensor:
        """Loss of one batch of this rank."""
        loss = batch_loss(self.network, batch, self.recipe)
        self.pending.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        """The recipe's optimizer with its learning rate set at every step."""
        optimizer = build_optimizer(self.network, self.recipe, self.peak_learning_rate)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate_factor(self.recipe, step, self.steps_per_epoch)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the curves, so that a resumed run reports the whole course. Plain types only."""
        checkpoint[STATE_KEY] = {
            "step": int(self.global_step),
            "steps_per_epoch": self.steps_per_epoch,
            "losses": torch.tensor(self.losses, dtype=torch.float64),
            "validation_accuracy": torch.tensor(self.validation_accuracy, dtype=torch.float64),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the curves up again."""
        state = checkpoint[STATE_KEY]
        self.losses = state["losses"].tolist()
        self.validation_accuracy = state["validation_accuracy"].tolist()
