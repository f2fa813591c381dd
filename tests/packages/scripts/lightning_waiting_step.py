"""Lightning, by its older name. Planted: training_step waits 10 ms."""

import time

import pytorch_lightning as pl
import torch
from settings import NUM_STEPS, TRAINER
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Waiting(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(32, 1)

    def training_step(self, batch, batch_idx):
        time.sleep(0.01)
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


if __name__ == "__main__":
    pl.seed_everything(0)
    data = TensorDataset(torch.randn(16 * NUM_STEPS, 32), torch.randn(16 * NUM_STEPS, 1))
    trainer = pl.Trainer(max_epochs=1, **TRAINER)
    trainer.fit(Waiting(), DataLoader(data, batch_size=16, shuffle=True))
    print(f"loss {trainer.callback_metrics['train_loss'].item()!r}")
