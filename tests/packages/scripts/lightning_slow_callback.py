"""Lightning. Planted: a callback that takes 10 ms after each batch."""

import time

import lightning as L
import torch
from settings import NUM_STEPS, TRAINER
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Report(L.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        time.sleep(0.01)


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(32, 1)

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


if __name__ == "__main__":
    L.seed_everything(0)
    data = TensorDataset(torch.randn(16 * NUM_STEPS, 32), torch.randn(16 * NUM_STEPS, 1))
    trainer = L.Trainer(max_epochs=1, callbacks=[Report()], **TRAINER)
    trainer.fit(Regression(), DataLoader(data, batch_size=16, shuffle=True))
    print(f"loss {trainer.callback_metrics['train_loss'].item()!r}")
