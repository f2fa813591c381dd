"""Lightning, a GAN with manual optimization and two optimizers. Planted: collecting a batch takes 30 ms."""

import time

import lightning as L
import torch
from settings import NUM_STEPS, TRAINER
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate


def collate(samples):
    time.sleep(0.03)
    return default_collate(samples)


class GAN(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32))
        self.discriminator = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch, batch_idx):
        generating, judging = self.optimizers()
        noise = torch.randn(len(batch[0]), 16)
        for optimizer, is_judging in ((judging, True), (generating, False)):
            made = self.discriminator(self.generator(noise))
            loss = nn.functional.softplus(made if is_judging else -made).mean()
            if is_judging:
                loss = loss + nn.functional.softplus(-self.discriminator(batch[0])).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.log("judging" if is_judging else "generating", loss)

    def configure_optimizers(self):
        return [torch.optim.Adam(part.parameters(), lr=2e-4) for part in (self.generator, self.discriminator)]


if __name__ == "__main__":
    L.seed_everything(0)
    trainer = L.Trainer(max_epochs=1, **TRAINER)
    loader = DataLoader(TensorDataset(torch.randn(16 * NUM_STEPS, 32)), batch_size=16, collate_fn=collate)
    trainer.fit(GAN(), loader)
    print(f"loss {trainer.callback_metrics['judging'].item()!r}")
