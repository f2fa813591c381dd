"""Steps of Lightning's trainers that take turns in one process."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import UserDict
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace

import lightning.pytorch as pl
import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from paceline.tasks.errors import InputError
from paceline.tasks.train.lightning import pausing
from paceline.tasks.train.lightning.feed import FedDevice
from paceline.tasks.train.lightning.step_parts import count_units
from paceline.tasks.train.lightning.trainer_steps import TrainerSteps, halve, without_workers

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice


class Module(pl.LightningModule):
    """Remembers the sizes of its batches, and logs."""

    def __init__(self, loader):
        super().__init__()
        self.net, self.loader, self.sizes = nn.Linear(4, 1), loader, []

    def training_step(self, batch, batch_idx):
        self.sizes.append(len(batch[0]))
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        total = self.trainer.estimated_stepping_batches  # needs Lightning's own trainer
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total)]

    def train_dataloader(self):
        return self.loader()


class Looks(Module):
    """Reads the training loader in a hook."""

    def on_train_start(self):
        self.looked = [len(batch[0]) for batch in self.trainer.train_dataloader]


class Returns(Module):
    def training_step(self, batch, batch_idx):
        return None


class Fails(Module):
    def training_step(self, batch, batch_idx):
        raise ValueError("no such operation")


class Nothing(IterableDataset):
    def __iter__(self):
        return iter(())


def samples(number=20):
    return DataLoader(TensorDataset(torch.ones(number, 4)), batch_size=8, shuffle=True)


@pytest.fixture
def start():
    """Makes steps of a module."""
    started = []

    def make(module, **changes):
        def fit(steps):
            trainer = pl.Trainer(
                accelerator="cpu",
                devices=1,
                strategy=FedDevice(steps.wrap, device=CPU),
                callbacks=[steps],
                max_epochs=3,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            trainer.fit(module)

        steps = TrainerSteps(fit, CPU)
        for name, value in changes.items():
            setattr(steps, name, value)
        started.append(steps)
        return steps

    yield make
    for steps in started:
        steps.close()


def test_trainers_take_turns_and_each_trains_its_own_module(start):
    pl.seed_everything(1)
    modules = Module(samples), Module(samples)
    first, second = map(start, modules)
    for _ in range(3):
        assert len(first.run(4)) == 4
        assert len(second.run(2)) == 2
    assert [len(module.sizes) for module in modules] == [12, 6]
    assert set(modules[0].sizes) == {8}  # not the last batch of an epoch, with four samples
    assert all(seconds > 0 for seconds in first.run(3))
    assert first.batch_size == 8
    assert torch.isfinite(first.loss)
    assert not torch.equal(modules[0].net.weight, modules[1].net.weight)


def test_a_hook_that_reads_the_loader_reads_one_epoch_and_is_no_step(start):
    module = Looks(samples)
    assert len(start(module).run(4)) == 4
    assert module.looked == [8, 8, 4]
    assert len(module.sizes) == 4


def test_a_replay_reads_one_batch(start):
    read = []

    class Counted(TensorDataset):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    module = Module(lambda: DataLoader(Counted(torch.ones(40, 4)), batch_size=8))
    start(module, replays=True).run(7)
    assert len(module.sizes) == 7
    assert len(read) == 8


def test_workers_of_a_loader_read_only_in_its_own_steps(start):
    def loader(**settings):
        return DataLoader(TensorDataset(torch.ones(80, 4)), batch_size=8, **settings)

    class Two(Module):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch["first"], batch_idx)

    module = Two(lambda: {"first": loader(num_workers=1), "second": loader(num_workers=1, persistent_workers=True)})
    steps = start(module)
    others = {*multiprocessing.active_children()}
    for _ in range(2):  # and over the end of an epoch
        steps.run(9)
        workers = [psutil.Process(each.pid) for each in {*multiprocessing.active_children()} - others]
        assert len(workers) == 2
        for worker in workers:
            while worker.status() != psutil.STATUS_STOPPED:  # or the time limit of the test ends it
                time.sleep(0.01)
    assert steps.num_workers == [1, 1]
    steps.close()  # or they could not end
    for worker in workers:
        with suppress(psutil.NoSuchProcess):  # it has ended
            while worker.status() == psutil.STATUS_STOPPED:
                time.sleep(0.01)
    assert len(module.sizes) == 18


def test_half_a_batch_has_half_the_samples(start):
    module = Module(samples)
    assert start(module, splits=True).run(3)
    assert module.sizes == [4, 4, 4]
    first, second = (halve({"a": torch.arange(6), "b": [torch.tensor(1), "c"]}, part) for part in (0, 1))
    assert torch.equal(torch.cat([first["a"], second["a"]]), torch.arange(6))
    assert first["b"] == second["b"] == [1, "c"]
    for batch in (UserDict(a=torch.arange(6)), Pair(torch.arange(6))):
        first, second = (halve(batch, part) for part in (0, 1))
        assert type(first) is type(batch)
        assert torch.equal(torch.cat([values(first), values(second)]), torch.arange(6))
        assert len(values(batch)) == 6, "the whole stays as it is"


@dataclass(frozen=True)
class Pair:
    a: torch.Tensor


def values(batch):
    return batch["a"] if isinstance(batch, UserDict) else batch.a


def test_a_loader_reads_without_its_workers(start):
    module = Module(lambda: DataLoader(TensorDataset(torch.ones(40, 4)), batch_size=8, num_workers=2, timeout=9))
    steps = start(module, change_loader=without_workers)
    steps.run(2)
    assert steps.num_workers == [0]
    assert module.sizes == [8, 8]


@pytest.mark.parametrize(
    ("module", "error", "text"),
    [
        (lambda: Fails(samples), ValueError, "no such operation"),
        (lambda: Returns(samples), InputError, "returned None"),
        (lambda: Module(lambda: DataLoader(Nothing())), InputError, "has no batch"),
    ],
)
def test_an_error_of_the_module_is_that_of_the_steps(start, module, error, text):
    steps = start(module())
    for _ in range(2):
        with pytest.raises(error, match=text):
            steps.run(1)


COUNTED = SimpleNamespace(units={"tokens": "ids", "bytes": lambda batch: 2 * len(batch["ids"]), "steps": 1})


@pytest.mark.parametrize(
    ("own", "batch", "expected"),
    [
        (COUNTED, {"ids": torch.ones(3, 4)}, {"tokens": 12, "bytes": 6, "steps": 1}),
        ({"units": {"tokens": "count"}}, {"count": 7}, {"tokens": 7}),
        (None, {"paceline.units": {"tokens": torch.tensor(5)}}, {"tokens": 5}),
        (None, {"ids": torch.ones(3)}, {}),
        (None, [torch.ones(3)], {}),
    ],
)
def test_units_are_those_of_the_module_or_of_the_batch(own, batch, expected):
    module = Module(samples)
    if own is not None:
        module.paceline = own
    assert count_units(module, batch) == expected


def test_a_unit_in_a_tensor_is_not_read_in_the_step():
    module = Module(samples)
    module.paceline = {"units": {"words": lambda batch: batch["num_words"].sum()}}
    count_units(module, {"num_words": torch.ones(3, device="meta")})  # which has no values


NOT_COUNTED = [
    {"tokens": "ids"},
    {"to kens": 1},
    {"tokens": lambda batch: batch.nothing},
    {"tokens": lambda batch: torch.ones(2)},
]


@pytest.mark.parametrize("units", NOT_COUNTED)
def test_a_unit_that_cannot_be_counted_is_refused(units):
    module = Module(samples)
    module.paceline = {"units": units}
    with pytest.raises(InputError, match="cannot be counted") as refusal:
        count_units(module, {"other": 1})
    assert "paceline.units" in refusal.value.hint


def test_batches_that_other_workers_may_have_read_are_not_timed(start):
    data = TensorDataset(torch.ones(160, 4))
    module = Module(lambda: DataLoader(data, batch_size=8, num_workers=1, multiprocessing_context="spawn"))
    steps = start(module)
    for _ in range(2):
        assert len(steps.run(3)) == 3
    assert len(module.sizes) == 8, "two batches were ahead"


KILLED = """
import multiprocessing, os, signal, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from paceline.tasks.train.lightning import pausing
worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
worker.start()
assert pausing.pause([worker])
if sys.argv[1] == "continued":
    pausing.resume()
    assert os.getpgid(worker.pid) == os.getpgrp()
print(worker.pid, flush=True)
time.sleep(600)
"""


def test_a_worker_that_has_ended_is_not_continued():
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
    worker.start()
    assert pausing.pause([worker])
    worker.kill()
    os.waitpid(worker.pid, 0)  # its object does not notice
    assert worker in multiprocessing.active_children()
    pausing.resume([worker])
    multiprocessing.process._children.discard(worker)  # else its number gets a signal at the end of Python


@pytest.mark.parametrize("state", ["paused", "continued"])
def test_a_worker_ends_with_the_group_of_its_rank(state):
    command = [sys.executable, "-c", KILLED, state]
    rank = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    worker = psutil.Process(int(rank.stdout.readline()))
    os.killpg(rank.pid, signal.SIGKILL)
    try:
        worker.wait(10)
    finally:
        with suppress(psutil.NoSuchProcess):
            worker.kill()
        rank.communicate()
