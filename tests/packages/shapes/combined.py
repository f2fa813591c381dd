"""A module and its data with the features of Lightning that a setting chooses, for comparisons of combinations."""

import random

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
    random_split,
)

NUM_SAMPLES, BATCH = 96, 8
losses: list[float] = []
"""Of all training steps in this process."""


class Noisy(Dataset):
    """Samples of a sum, with random numbers of a library in each."""

    def __init__(self, noise: str = ""):
        self.inputs = torch.randn(NUM_SAMPLES, 8, generator=torch.Generator().manual_seed(0))
        self.noise = noise

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        inputs = self.inputs[index]
        drawn = {"torch": lambda: float(torch.rand(1)), "numpy": np.random.rand, "python": random.random}
        if self.noise:
            inputs = inputs + 0.1 * drawn[self.noise]()
        return inputs, self.inputs[index].sum(0, keepdim=True)


class Stream(IterableDataset):
    """The same samples in their order, shared among workers."""

    def __iter__(self):
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        samples = Noisy()
        return (samples[index] for index in range(first, NUM_SAMPLES, step))


class Reseeded(Sampler):
    """An order for each epoch that Lightning sets."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(self.epoch)).tolist())

    def __len__(self):
        return NUM_SAMPLES


class Uneven(Sampler):
    """Batches of different sizes, with a generator of its own and one of Python."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(4)

    def __iter__(self):
        order = torch.randperm(NUM_SAMPLES, generator=self.generator).tolist()
        while order:
            number = random.choice([4, 8, 12])
            yield order[:number]
            order = order[number:]

    def __len__(self):
        return 12


class Shuffled:
    """A loader that is none of torch."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        for batch in torch.randperm(len(self)).tolist():
            yield default_collate([self.samples[BATCH * batch + index] for index in range(BATCH)])

    def __len__(self):
        return len(self.samples) // BATCH


def noisy_collate(rows):
    """Scale the inputs of a batch by a random number."""
    inputs, targets = default_collate(rows)
    return inputs * (1 + 0.1 * torch.rand(1)), targets


LOADERS = {
    "plain": lambda train, **options: DataLoader(train, BATCH, shuffle=True, **options),
    "dict": lambda train, **options: {
        "first": DataLoader(train, BATCH, shuffle=True),
        "second": DataLoader(train, 4, shuffle=True),
    },
    "list": lambda train, **options: [DataLoader(train, BATCH, shuffle=True), DataLoader(train, 4)],
    "longest": lambda train, **options: CombinedLoader(
        [DataLoader(train, BATCH, shuffle=True), DataLoader(train, 4)], mode="max_size"
    ),
    "stream": lambda train, **options: DataLoader(Stream(), BATCH, **options),
    "collate": lambda train, **options: DataLoader(train, BATCH, shuffle=True, collate_fn=noisy_collate, **options),
    "batch sampler": lambda train, **options: DataLoader(Noisy(), batch_sampler=Uneven(), **options),
    "epoch sampler": lambda train, **options: DataLoader(Noisy(), BATCH, sampler=Reseeded(), **options),
    "weighted": lambda train, **options: DataLoader(
        train, BATCH, sampler=WeightedRandomSampler(torch.rand(len(train)), len(train)), **options
    ),
    "samples": lambda train, **options: DataLoader(train, batch_size=None, shuffle=True, **options),
    "generator": lambda train, **options: DataLoader(
        train, BATCH, shuffle=True, generator=torch.Generator().manual_seed(9), **options
    ),
    "other class": lambda train, **options: Shuffled(train),
}


class Data(pl.LightningDataModule):
    """Splits the samples by a generator."""

    def __init__(self, loader: str = "plain", num_workers: int = 0, noise: str = ""):
        super().__init__()
        self.loader, self.num_workers, self.noise = loader, num_workers, noise

    def setup(self, stage):
        split = torch.Generator().manual_seed(1)
        self.train, self.validation = random_split(Noisy(self.noise), [NUM_SAMPLES - 16, 16], split)

    def train_dataloader(self):
        return LOADERS[self.loader](self.train, num_workers=self.num_workers)

    def val_dataloader(self):
        return DataLoader(self.validation, BATCH)


def one_cycle(module, optimizer):
    """A schedule over all steps of the training."""
    number = int(module.trainer.estimated_stepping_batches)
    return {"scheduler": lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=number), "interval": "step"}


SCHEDULES = {
    "one cycle": one_cycle,
    "plateau": lambda module, optimizer: {
        "scheduler": lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5),
        "monitor": "val_mean",
    },
    "plateau of steps": lambda module, optimizer: {
        "scheduler": lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5),
        **{"monitor": "train", "interval": "step", "frequency": 3},
    },
    "by hand": lambda module, optimizer: lr_scheduler.StepLR(optimizer, 3, 0.5),
}


class Net(pl.LightningModule):
    """A network with dropout and a buffer, and a mean over the validation that it computes itself."""

    def __init__(self, optimizer: str = "sgd", schedule: str = "", lr: float = 0.002):
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
        self.register_buffer("mean", torch.zeros(1))
        self.lr, self.validated = lr, []
        self.automatic_optimization = schedule != "by hand"

    def loss(self, batch):
        """The loss of a batch, or of a tree of batches."""
        if isinstance(batch, dict):
            batch = list(batch.values())
        if not isinstance(batch[0], torch.Tensor):
            return sum(self.loss(each) for each in batch if each is not None)
        inputs, targets = batch
        return functional.mse_loss(self.layers(inputs), targets)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        losses.append(float(loss))
        self.mean.mul_(0.9).add_(0.1 * loss.detach())
        self.log("train", loss)
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            self.clip_gradients(self.optimizers(), gradient_clip_val=0.5)
            self.optimizers().step()
            self.optimizers().zero_grad()
            self.lr_schedulers().step()
        return loss

    def validation_step(self, batch, batch_idx):
        self.validated.append(self.loss(batch))
        self.log("val", self.validated[-1])

    def on_validation_epoch_end(self):
        self.log("val_mean", torch.stack(self.validated).mean())
        self.validated.clear()

    def configure_optimizers(self):
        name = self.hparams.optimizer
        options = {"lr": 0.1, "max_iter": 3} if name == "lbfgs" else {"lr": self.lr}
        kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "lbfgs": torch.optim.LBFGS}[name]
        optimizer = kind(self.parameters(), **options)
        if not self.hparams.schedule:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": SCHEDULES[self.hparams.schedule](self, optimizer)}


class Hooked(Net):
    """Overrides hooks of batches and optimizers."""

    def on_before_zero_grad(self, optimizer):
        torch.rand(1)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="value")

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + self.trainer.global_step)
        optimizer.step(closure=optimizer_closure)

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return super().transfer_batch_to_device([part * 1.01 for part in batch], device, dataloader_idx)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] + 0.01 * torch.randn_like(batch[0]), batch[1]]
