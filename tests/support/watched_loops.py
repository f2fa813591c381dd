"""Training loops for the account of `paceline watch`, and a time that they may plan."""

from itertools import islice

import torch
from torch import nn
from torch.utils.data import Dataset

from paceline.tasks.measure.validity import judge as judge_validity
from paceline.tasks.records.measurement import Validity
from paceline.tasks.watch.account import Account
from paceline.tasks.watch.hooks import follow

NUM_SAMPLES, BATCH = 480, 4
QUIET = judge_validity(Validity(foreign_load=0.0, num_cores=2))


class Clock:
    """A time that passes as tests say, and by a microsecond for each look at it."""

    def __init__(self):
        self.now = self.busy = 0.0

    def monotonic(self):
        self.work(1e-6)
        return self.now

    def thread_time(self):
        return self.busy

    def sleep(self, seconds):
        self.now += seconds

    def work(self, seconds):
        self.now += seconds
        self.busy += seconds


CLOCK = Clock()


class Numbers(Dataset):
    """Samples that take a time to read, and may draw random numbers."""

    def __init__(self, *, seconds=0.0, draw=None, bad=None):
        self.seconds, self.draw, self.bad = seconds, draw, bad

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        if index == self.bad:
            raise ValueError(f"sample {index} is broken")
        if self.seconds:
            CLOCK.sleep(self.seconds)
        noise = self.draw() if self.draw else 0.0
        return torch.full((8,), index / NUM_SAMPLES) + noise, torch.tensor([float(index % 2)])


def train(loader, num_epochs=1, *, in_work=0.001, in_step=0.0, in_loop=0.0, limit=None, validation=None):
    """A plain loop; returns its losses and the batches it saw."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.2), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses, seen = [], []
    for _ in range(num_epochs):
        for number, (inputs, targets) in enumerate(islice(loader, limit)):
            seen.append(inputs.clone())
            CLOCK.sleep(in_step)
            CLOCK.work(in_work)
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            CLOCK.sleep(in_loop)
            if validation is not None and number % 10 == 9:
                with torch.no_grad():
                    losses += [float(model(inputs).sum()) for inputs, _ in validation]
    return losses, torch.stack(seen)


def watched(loader, *arguments, **options):
    account = Account()
    with follow(account):
        outcome = train(loader, *arguments, **options)
    account.stop()
    account.validity = QUIET
    return outcome, account


class QuietWatch:
    def __init__(self, pids):
        pass

    def stop(self):
        return QUIET
