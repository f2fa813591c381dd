"""Lightning. Planted: a worker that reads a sample in 1 ms, while the step takes a few."""

import time

import lightning as L
import torch
from settings import NUM_STEPS, TRAINER
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):
    def __len__(self):
        return 16 * NUM_STEPS

    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.full((32,), index / len(self)) + torch.rand(32), torch.tensor([1.0])


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
    L.seed_everything(0, workers=True)
    trainer = L.Trainer(max_epochs=1, **TRAINER)
    trainer.fit(Regression(), DataLoader(Slow(), batch_size=16, shuffle=True, num_workers=1))
    print(f"loss {trainer.callback_metrics['train_loss'].item()!r}")
