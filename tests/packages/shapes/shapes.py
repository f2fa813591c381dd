"""Modules of the shapes that Lightning's documentation shows; nothing is imported from Paceline."""

import lightning.pytorch as pl
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


class Noise(pl.LightningDataModule):
    """Vectors of noise."""

    def __init__(self, num_samples: int = 160, width: int = 8, batch_size: int = 16):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        generator = torch.Generator().manual_seed(0)
        self.samples = TensorDataset(torch.randn(self.hparams.num_samples, self.hparams.width, generator=generator))

    def train_dataloader(self):
        return DataLoader(self.samples, batch_size=self.hparams.batch_size, shuffle=True)


class GAN(pl.LightningModule):
    """Two optimizers, taken in turn by the module itself."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.automatic_optimization = False
        self.generate = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, width))
        self.judge = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        (real,) = batch
        generator, judge = self.optimizers()
        drawn = torch.randn(len(real), 4, device=self.device)
        for optimizer, loss_of in ((judge, self._judge_loss), (generator, self._generator_loss)):
            self.toggle_optimizer(optimizer)
            loss = loss_of(real, drawn)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.log("generator_loss" if optimizer is generator else "judge_loss", loss, prog_bar=True)

    def _judge_loss(self, real, drawn):
        return functional.softplus(self.judge(self.generate(drawn).detach())).mean() + self._real_loss(self.judge(real))

    def _generator_loss(self, real, drawn):
        return self._real_loss(self.judge(self.generate(drawn)))

    def _real_loss(self, judged):
        return functional.softplus(-judged).mean()

    def configure_optimizers(self):
        return [torch.optim.Adam(part.parameters(), lr=2e-3) for part in (self.generate, self.judge)]


class Autoencoder(pl.LightningModule):
    """One optimizer with a schedule over all steps; a metric over all ranks."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.encode, self.decode = nn.Linear(width, 3), nn.Linear(3, width)

    def training_step(self, batch, batch_idx):
        loss = functional.mse_loss(self.decode(self.encode(batch[0])), batch[0])
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Gathered(Autoencoder):
    """Compares its samples with those of all ranks, which it gathers itself, in a group of its own."""

    def setup(self, stage):
        self.ranks = distributed.new_group()

    def training_step(self, batch, batch_idx):
        codes = self.encode(batch[0])
        everyone = [torch.empty_like(codes) for _ in range(distributed.get_world_size())]
        distributed.all_gather(everyone, codes.detach(), group=self.ranks)
        apart = functional.cross_entropy(codes @ torch.cat(everyone).T, torch.arange(len(codes)))
        return apart + functional.mse_loss(self.decode(codes), batch[0])

    def teardown(self, stage):
        distributed.barrier()


class Halfway(Autoencoder):
    """Raises on the second rank alone."""

    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 2:
            raise FileNotFoundError("sample 7 of this rank is not there")
        return super().training_step(batch, batch_idx)


class Configured(Autoencoder):
    """Its layers are made in the trainer."""

    def __init__(self, width: int = 8):
        super().__init__(width)
        self.width, self.encode, self.decode = width, None, None

    def configure_model(self):
        if self.encode is None:
            self.encode, self.decode = nn.Linear(self.width, 3), nn.Linear(3, self.width)
            for layer in (self.encode, self.decode) if self.device_mesh is not None else ():
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
