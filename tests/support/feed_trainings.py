"""Short trainings whose loaders are feeds, without the rest of a run, and the same by Lightning alone."""

import random
from functools import partial

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
)

from paceline.tasks.train.checkpoint_interval import FailureHistory
from paceline.tasks.train.lightning.callbacks import SaveCheckpoint, StepAccount
from paceline.tasks.train.lightning.feed import FedDevice, FeedState, feed
from paceline.tasks.train.rank.checkpoint import newest_valid_checkpoint
from paceline.tasks.train.rank.checkpoint_io import AtomicCheckpointIO
from paceline.tasks.train.rank.time_budget import Stopwatch

NUM_EPOCHS, NUM_BATCHES = 3, 8
READ_AHEAD = {"limit_train_batches": 1.0, "max_steps": NUM_EPOCHS * NUM_BATCHES}
"""Without a number of batches, Lightning reads one ahead to notice the last one."""


class Noise(IterableDataset):
    """Samples drawn from torch's generator, without a length."""

    def __iter__(self):
        for _ in range(8 * NUM_BATCHES):
            yield torch.randn(4)


class Augmented(Dataset):
    """Samples with noise of generators of its own."""

    def __init__(self):
        self.dice, self.legacy = random.Random(1), np.random.RandomState(2)
        self.noise = [np.random.Generator(kind(3)) for kind in (np.random.PCG64, np.random.MT19937, np.random.SFC64)]
        self.first, self.second, self.third = self.noise

    def __len__(self):
        return 8 * NUM_BATCHES

    def __getitem__(self, index):
        drawn = sum(each.normal() for each in self.noise) + self.legacy.normal() + self.dice.gauss(0, 1)
        return torch.full((4,), drawn)


class Sampler(torch.utils.data.Sampler):
    """A random order by a generator of its own."""

    def __init__(self):
        self.generator = np.random.default_rng(5)

    def __iter__(self):
        yield from self.generator.permutation(8 * NUM_BATCHES).tolist()

    def __len__(self):
        return 8 * NUM_BATCHES


class Stateful(DataLoader):
    """A shuffled loader that keeps its place in its state, as torchdata's StatefulDataLoader does."""

    position, restored = None, None

    def __iter__(self):
        order, first = self.restored or (torch.randperm(len(self.dataset)).tolist(), 0)
        self.restored = None
        for number in range(first, NUM_BATCHES):
            self.position = [order, number + 1]
            yield self.collate_fn([self.dataset[index] for index in order[8 * number : 8 * number + 8]])

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.restored = state["position"]


class StatefulStream(DataLoader):
    """Batches drawn from torch's generator, without a length, from the place that its state holds."""

    position, first = 0, 0

    def __iter__(self):
        first, self.first = self.first, 0
        for number in range(first, NUM_BATCHES):
            self.position = number + 1
            yield torch.randn(8, 4) + number

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.first = state["position"]


def torchdata_loader(**options):
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(TensorDataset(torch.randn(8 * NUM_BATCHES, 4)), batch_size=8, shuffle=True, **options)


def torchdata_stream():
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Noise(), batch_size=8)


class Module(pl.LightningModule):
    """Draws random numbers in each step, and logs in each way."""

    def __init__(self, loader):
        super().__init__()
        self.loader = loader
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))
        self.seen = {}

    def training_step(self, batch, batch_idx):
        if isinstance(batch, dict):
            batch = [batch["long"][0] + batch["short"][0]]
        inputs = batch[0] if isinstance(batch, list) else batch
        loss = (self.net(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch[0]).mean())

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]

    def train_dataloader(self):
        return self.loader()

    def val_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4)


class Curve(pl.loggers.Logger):
    """What a module logs, by step."""

    name, version = "curve", 0

    def __init__(self):
        super().__init__()
        self.metrics = {}

    def log_metrics(self, metrics, step=None):
        self.metrics |= {(name, step): value for name, value in metrics.items()}

    def log_hyperparams(self, *args, **kwargs):
        pass


class Interrupt(pl.Callback):
    def __init__(self, batch):
        self.batch = batch

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.fit_loop.total_batch_idx == self.batch:
            raise ConnectionError("interrupted")


def shuffled(num_batches, values=torch.randn, **options):
    return DataLoader(TensorDataset(values(8 * num_batches, 4)), batch_size=8, shuffle=True, **options)


persistent = partial(shuffled, num_workers=1, persistent_workers=True)
SAMPLES = TensorDataset(torch.ones(8 * NUM_BATCHES, 4).cumsum(0) / 50)


LOADERS = {
    "shuffled": lambda: shuffled(NUM_BATCHES),
    "own generator": lambda: shuffled(NUM_BATCHES, torch.ones, generator=torch.Generator()),
    "own generators of the dataset": lambda: DataLoader(
        Subset(Augmented(), range(8 * NUM_BATCHES)), batch_size=8, sampler=Sampler()
    ),
    "own generator inside a batch sampler": lambda: DataLoader(
        SAMPLES, batch_sampler=BatchSampler(RandomSampler(SAMPLES, generator=torch.Generator()), 8, drop_last=False)
    ),
    "with state": lambda: Stateful(TensorDataset(torch.randn(8 * NUM_BATCHES, 4)), batch_size=8),
    "of torchdata": torchdata_loader,
    "of torchdata, persistent": partial(torchdata_loader, num_workers=1, persistent_workers=True),
    "of torchdata, without length": torchdata_stream,
    "without length": lambda: DataLoader(Noise(), batch_size=8),
    "with state, without length": lambda: StatefulStream(Noise(), batch_size=8),
    "persistent workers": lambda: persistent(NUM_BATCHES),
    "persistent workers, equal samples": lambda: persistent(NUM_BATCHES, torch.ones),
    "several persistent": lambda: {"long": persistent(NUM_BATCHES), "short": persistent(NUM_BATCHES // 2)},
    "several": lambda: {"long": shuffled(NUM_BATCHES), "short": shuffled(NUM_BATCHES // 2)},
}


def train(
    loader,
    options,
    directory=None,
    every=None,
    stop_at=None,
    *,
    callbacks=(),
    progress=None,
    kind=Module,
    start=None,
    is_restart=True,
):
    """Weights and metrics of a training, by Lightning alone without a directory, from a checkpoint or from `start`."""
    pl.seed_everything(3)
    curve = Curve()
    settings = {"accelerator": "cpu", "devices": 1, "max_epochs": NUM_EPOCHS, "log_every_n_steps": 1, "logger": curve}
    settings |= {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_train_batches": NUM_BATCHES,
    } | options
    module = kind(LOADERS[loader])
    if directory is None:
        pl.Trainer(**settings, enable_checkpointing=False).fit(module, ckpt_path=start)
        return module.state_dict(), curve.metrics
    stopwatch = Stopwatch("setup")
    state = FeedState(stopwatch)
    account = StepAccount(stopwatch, state, None, progress, {})
    checkpoints = SaveCheckpoint(account, state, directory, every, 0, FailureHistory, is_restart=is_restart)
    callbacks = [*callbacks, account, checkpoints]
    settings |= {"callbacks": callbacks if stop_at is None else [Interrupt(stop_at), *callbacks]}
    plugins = {
        "plugins": [AtomicCheckpointIO(directory / "attempt-0", directory)],
        "strategy": FedDevice(partial(feed, state), device=torch.device("cpu")),
    }
    newest = newest_valid_checkpoint(directory) if directory.exists() else start
    trainer = pl.Trainer(**settings, **plugins)
    trainer.fit(module, ckpt_path=str(newest) if newest else None, weights_only=True)
    return module.state_dict(), curve.metrics
