"""What hooks find as their loaders, and change of them, is as in Lightning alone."""

import copy
import pickle
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from paceline.tasks.train.lightning.callbacks import StepAccount
from paceline.tasks.train.lightning.feed import FedDevice, FeedState, feed
from paceline.tasks.train.lightning.trainer_steps import TrainerSteps
from paceline.tasks.train.rank.time_budget import Stopwatch

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice
CPU = torch.device("cpu")


class Scaled(DataLoader):
    """Multiplies its batches by an attribute, if it has one."""

    def __iter__(self):
        for (batch,) in super().__iter__():
            yield batch * getattr(self, "factor", 1)


class Kept(Scaled):
    """The same with a state."""

    def state_dict(self):
        return {"kept": True}

    def load_state_dict(self, state):
        pass


class Listed(list):
    """Batches in a list, which is one loader."""


def negative(samples):
    return [-part for part in default_collate(samples)]


class Module(pl.LightningModule):
    """Changes its loaders before its second epoch, and keeps what it has seen."""

    def __init__(self, kind):
        super().__init__()
        self.net, self.kind, self.seen = nn.Linear(4, 1), kind, []

    def training_step(self, batch, batch_idx):
        self.seen.append(float(batch.sum()))
        return self.net(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        self.seen.append(float(batch.sum()))

    def on_train_epoch_start(self):
        for loader in (self.trainer.train_dataloader, self.trainer.val_dataloaders):
            self.seen.append([isinstance(loader, each) for each in (DataLoader, Scaled, Kept, list)])
            others = copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))
            self.seen += [type(each) is self.kind and each is not loader for each in others]
            self.seen += [float(batch.sum()) for batch in others[1]]
            if self.current_epoch and self.kind is not Listed:
                loader.collate_fn, loader.factor = negative, 3

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self):
        samples = torch.arange(96.0).reshape(24, 4)
        return Listed(samples.split(8)) if self.kind is Listed else self.kind(TensorDataset(samples), batch_size=8)

    val_dataloader = train_dataloader


def fit(module, **options):
    settings = {"accelerator": "cpu", "devices": 1, "max_epochs": 2, "logger": False, "enable_progress_bar": False}
    settings |= {"enable_model_summary": False, "enable_checkpointing": False}
    pl.Trainer(**settings, **options).fit(module)
    return module.seen


@pytest.mark.parametrize("kind", [Scaled, Kept, Listed])
def test_hooks_find_and_change_their_loaders_as_in_lightning_alone(kind):
    stopwatch = Stopwatch("setup")
    state = FeedState(stopwatch)
    account = StepAccount(stopwatch, state, None, None, {})
    expected = fit(Module(kind))
    assert fit(Module(kind), callbacks=[account], strategy=FedDevice(partial(feed, state), device=CPU)) == expected
    assert stopwatch.budget()["data_wait"] > 0


def test_a_proxy_keeps_its_own_attributes_and_changes_none_of_the_loader():
    loader = Kept(TensorDataset(torch.ones(8, 4)), batch_size=4)
    before = dict(vars(loader))
    steps = TrainerSteps(lambda steps: None, CPU)
    for proxy in (feed(FeedState(Stopwatch("setup")), loader), steps.wrap(loader)):
        assert [float(batch.sum()) for batch in proxy] == [16, 16]
        assert vars(proxy) == vars(loader) == before
