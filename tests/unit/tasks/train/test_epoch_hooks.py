"""Hooks of the start of an epoch and of the end of the training have the same effects after a resume as without one."""

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, LambdaCallback
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from paceline.tasks.train.lightning.feed import FedDevice
from tests.support.feed_trainings import LOADERS, NUM_BATCHES, READ_AHEAD, Module, train

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice


class Levels(Dataset):
    """Samples that get larger by a level, as in a curriculum."""

    level = 0.0

    def __len__(self):
        return 8 * NUM_BATCHES

    def __getitem__(self, index):
        return torch.full((4,), index / 50 + self.level)


class LevelStream(IterableDataset):
    """The same without a length; workers share the samples."""

    level = 0.0

    def __iter__(self):
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for index in range(first, 8 * NUM_BATCHES, step):
            yield torch.full((4,), index / 50 + self.level)


class Order(Sampler):
    """An order that depends on the epoch, which a hook sets."""

    epoch = 0

    def __len__(self):
        return 8 * NUM_BATCHES

    def __iter__(self):
        return iter(torch.randperm(8 * NUM_BATCHES, generator=torch.Generator().manual_seed(self.epoch)).tolist())


def make(num_workers, *, is_stream=False, persistent=False):
    options = {"batch_size": 8, "num_workers": num_workers, "persistent_workers": persistent}
    return DataLoader(LevelStream(), **options) if is_stream else DataLoader(Levels(), sampler=Order(), **options)


NEW_LOADERS = {
    "levels": lambda: make(0),
    "levels of workers": lambda: make(2),
    "levels of persistent workers": lambda: make(2, persistent=True),
    "level stream": lambda: make(0, is_stream=True),
    "level stream of workers": lambda: make(2, is_stream=True),
}


RELOADED = {"reload_dataloaders_every_n_epochs": 1}


class Rising(Module):
    """Sets the level, an order and a dropout for each epoch, and draws random numbers there."""

    def train_dataloader(self):
        self.loader_of_training = self.loader()
        return self.loader_of_training

    def on_train_start(self):
        torch.rand(3)

    def on_train_epoch_start(self):
        loader = self.loader_of_training
        loader.dataset.level = float(self.current_epoch + torch.rand(()))
        loader.sampler.epoch = self.current_epoch + 10
        self.net[2].p = 0.1 * self.current_epoch


@pytest.mark.parametrize(
    ("loader", "options"),
    [
        *((name, {}) for name in NEW_LOADERS),
        *(pytest.param(name, RELOADED, marks=pytest.mark.slow) for name in NEW_LOADERS if "persistent" not in name),
        ("levels of persistent workers", RELOADED),
    ],
)
@pytest.mark.parametrize(
    ("every", "stop_at"),
    [(3, 5), (3, 13), (None, 13), (None, 21)],
    ids=["in the first epoch", "in the second epoch", "after the first epoch", "after the second epoch"],
)
def test_batches_after_a_resume_are_those_of_the_hooks(tmp_path, monkeypatch, loader, every, stop_at, options):
    monkeypatch.setitem(LOADERS, loader, NEW_LOADERS[loader])
    weights, curve = train(loader, options, kind=Rising)
    with pytest.raises(ConnectionError):
        train(loader, options, tmp_path, every, stop_at, kind=Rising)
    resumed, rest = train(loader, options, tmp_path, every, kind=Rising)
    steps = {key: value for key, value in rest.items() if key[0] == "loss_step"}
    assert steps
    assert {key: curve[key] for key in steps} == steps
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)


class Planned(Rising):
    """Asks for the number of all steps, for which Lightning makes the loader before it restores a training."""

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches == 3 * NUM_BATCHES
        return super().configure_optimizers()


@pytest.mark.parametrize("is_late", [False, True], ids=["", "states that are restored late"])
@pytest.mark.parametrize(("every", "stop_at"), [(3, 5), (3, 13), (None, 13)])
@pytest.mark.parametrize("loader", ["levels", "levels of workers"])
def test_a_loader_that_is_made_before_the_state_is_restored_resumes(
    tmp_path, monkeypatch, loader, every, stop_at, is_late
):
    monkeypatch.setattr(FedDevice, "restore_checkpoint_after_setup", is_late)  # as with shared weights
    monkeypatch.setitem(LOADERS, loader, NEW_LOADERS[loader])
    weights, _ = train(loader, {}, kind=Planned)
    with pytest.raises(ConnectionError):
        train(loader, {}, tmp_path, every, stop_at, kind=Planned)
    resumed, _ = train(loader, {}, tmp_path, every, kind=Planned)
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)


class Scaled(Module):
    """Its loss has a factor that a callback sets for each epoch."""

    factor = 1.0

    def training_step(self, batch, batch_idx):
        return self.factor * super().training_step(batch, batch_idx)

    def configure_callbacks(self):
        def start(trainer, module):
            module.factor = 0.5 + trainer.current_epoch

        return [LambdaCallback(on_train_epoch_start=start)]


@pytest.mark.parametrize("every", [3, None])
def test_a_function_that_is_called_at_the_start_of_an_epoch_is_called_again(tmp_path, every):
    weights, _ = train("shuffled", READ_AHEAD, kind=Scaled)
    with pytest.raises(ConnectionError):
        train("shuffled", READ_AHEAD, tmp_path, every, 13, kind=Scaled)
    resumed, _ = train("shuffled", READ_AHEAD, tmp_path, every, kind=Scaled)
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)


class Ending(Module):
    """Averages its weights, may stop early, and loses a rank at the end of its training, as often as is asked."""

    num_failures, stop_after = 0, 99
    ended = ()

    def configure_callbacks(self):
        def end(trainer, module):
            if kind.num_failures:
                kind.num_failures -= 1
                raise ConnectionError("a rank is lost")

        kind = type(self)
        return [LambdaCallback(on_train_end=end), EMAWeightAveraging(decay=0.9, update_every_n_steps=1)]

    def on_train_epoch_end(self):
        self.trainer.should_stop = self.current_epoch + 1 == self.stop_after

    def on_train_end(self):
        self.ended = (self.trainer.current_epoch, self.trainer.global_step, *sorted(self.trainer.callback_metrics))


@pytest.mark.parametrize("stop_after", [99, 2])
@pytest.mark.parametrize("num_failures", [1, 2])
def test_a_training_that_was_lost_at_its_end_ends_again(tmp_path, num_failures, stop_after):
    ended = []

    class Own(Ending):
        def on_train_end(self):
            super().on_train_end()
            ended.append(self.ended)

    Own.stop_after = stop_after
    weights, _ = train("shuffled", {}, kind=Own)
    Own.num_failures = num_failures
    for _ in range(num_failures):
        with pytest.raises(ConnectionError):
            train("shuffled", {}, tmp_path, kind=Own)
    resumed, _ = train("shuffled", {}, tmp_path, kind=Own)
    assert len(ended) == 2, "a failure of a callback comes before the hook of the module"
    assert ended[0] == ended[1]
    assert ended[0][0] == min(stop_after, 3)
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)
    assert not torch.equal(resumed["net.0.weight"], train("shuffled", {})[0]["net.0.weight"]), "it is an average"


def test_a_training_that_starts_from_one_that_has_stopped_goes_on(tmp_path):
    class Own(Ending):
        stop_after = 1

    train("shuffled", {}, tmp_path / "first", kind=Own)
    (start,) = (tmp_path / "first").glob("*.ckpt")
    _, curve = train("shuffled", {}, tmp_path / "second", start=start, is_restart=False, kind=Own)
    assert ("loss_step", 2 * NUM_BATCHES - 1) in curve
