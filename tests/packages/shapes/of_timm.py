"""A network of timm in a module; nothing is imported from Paceline."""

import lightning.pytorch as pl
import timm
import torch
from torch.nn import functional


class Classifier(pl.LightningModule):
    def __init__(self, name: str = "resnet10t", num_classes: int = 4):
        super().__init__()
        self.network = timm.create_model(name, num_classes=num_classes, in_chans=1)

    def training_step(self, batch, batch_idx):
        loss = functional.cross_entropy(self.network(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)
