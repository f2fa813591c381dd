"""Lightning. Planted: reading a sample takes 1 ms."""

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
        return torch.full((32,), index / len(self)), index % 2


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 2))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


if __name__ == "__main__":
    L.seed_everything(0)
    trainer = L.Trainer(max_epochs=1, **TRAINER)
    trainer.fit(Classifier(), DataLoader(Slow(), batch_size=16, shuffle=True))
    print(f"loss {trainer.callback_metrics['train_loss'].item()!r}")
