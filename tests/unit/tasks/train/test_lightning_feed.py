"""A user's training with feeds has the losses of Lightning alone, also when it is interrupted and resumed."""

import json
import re
import shutil
import time
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from typing import ClassVar

import lightning.pytorch as pl
import pytest
import torch

from paceline.tasks.errors import InputError
from paceline.tasks.train.lightning.callbacks import RELOADS, WORKERS, StepAccount
from paceline.tasks.train.rank.checkpoint import checkpoint_path, newest_valid_checkpoint
from tests.support.feed_trainings import NUM_BATCHES, NUM_EPOCHS, READ_AHEAD, Curve, Module, train

STEP = re.compile(r"step-(\d+)\.ckpt\b")
NEEDS_TORCHDATA = pytest.mark.skipif(find_spec("torchdata") is None, reason="torchdata is not installed")


class Looks:
    """Mixed into a module: reads the training loader in hooks, and draws numbers there."""

    def on_train_start(self):
        self.looked = [batch[0].mean() for batch in self.trainer.train_dataloader]
        assert len(self.looked) == NUM_BATCHES
        torch.rand(3)

    def on_train_epoch_start(self):
        torch.rand(self.current_epoch + 1)


class Plateau(Module):
    """Lowers the learning rate by a metric, each time that it is asked."""

    def __init__(self, loader, monitor, interval):
        super().__init__(loader)
        self.plateau = {"monitor": monitor, "interval": interval, "strict": False}

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        lower = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": self.plateau | {"scheduler": lower}}


class Slow(Curve):
    """Logs slowly, and looks for a checkpoint that contains the step."""

    def __init__(self, directory):
        super().__init__()
        self.directory, self.early = directory, []

    def log_metrics(self, metrics, step=None):
        time.sleep(0.1)  # in which a checkpoint would be written
        self.early += [step] * checkpoint_path(self.directory, step + 1).exists()
        super().log_metrics(metrics, step)


@pytest.mark.filterwarnings("ignore")  # Lightning's advice
@pytest.mark.parametrize("every", [3, None])
def test_a_checkpoint_is_not_there_before_the_metrics_of_its_steps(tmp_path, every):
    curve = Slow(tmp_path)
    train("shuffled", {"logger": curve, "max_epochs": 2}, tmp_path, every)
    assert curve.early == [], "a resume does not log them again"
    assert newest_valid_checkpoint(tmp_path) is not None


class Saving(Module):
    """Saves a checkpoint of its own after each batch, and copies it."""

    def __init__(self, loader, directory):
        super().__init__(loader)
        self.directory = directory

    def on_train_batch_end(self, outputs, batch, batch_idx):
        path = checkpoint_path(self.directory, self.trainer.fit_loop.total_batch_idx + 1)
        self.trainer.save_checkpoint(path)
        shutil.copy(path, path.with_suffix(".copy"))


@pytest.mark.filterwarnings("ignore")  # Lightning's advice
def test_checkpoints_of_the_users_code_are_those_of_lightning(tmp_path):
    curve, kind = Slow(tmp_path / "checkpoints"), partial(Saving, directory=tmp_path)
    train("shuffled", {"logger": curve, "max_epochs": 1}, tmp_path / "checkpoints", 3, kind=kind)
    assert curve.early == [], "theirs let none of the run be written"
    assert len(list(tmp_path.glob("step-*.ckpt"))) == NUM_BATCHES, "none is removed"
    start = checkpoint_path(tmp_path, 5)
    weights, _ = train("shuffled", {}, start=start)
    resumed, _ = train("shuffled", {}, tmp_path / "again", start=start)
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)


@pytest.mark.filterwarnings("ignore")  # Lightning's advice
def test_a_resume_with_a_new_loader_where_lightning_keeps_the_old_one_is_noted(tmp_path):
    noted = []
    for stop_at in (13, None):
        options = {"reload_dataloaders_every_n_epochs": 2}
        with suppress(ConnectionError):
            train("shuffled", options, tmp_path / "checkpoints", 3, stop_at, progress=tmp_path / "progress.json")
        noted.append(RELOADS in json.loads((tmp_path / "progress.json").read_text())["notes"])
    assert noted == [False, True]


class Marked(torch.Tensor):
    """A subclass, as of images with notes on them."""


class LogsMarked(Module):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("marked", torch.ones(()).as_subclass(Marked))


@pytest.mark.filterwarnings("ignore")  # Lightning's advice
def test_a_checkpoint_has_metrics_of_subclasses_as_plain_tensors(tmp_path):
    train("shuffled", {}, tmp_path, 3, kind=LogsMarked)
    newest = torch.load(newest_valid_checkpoint(tmp_path), weights_only=True)
    (metrics,) = newest["callbacks"]["paceline"]["metrics"]  # of each rank
    assert type(metrics["marked"]) is torch.Tensor


@pytest.mark.filterwarnings("ignore")  # Lightning's advice
def test_a_checkpoint_of_other_ranks_is_one_of_lightning(tmp_path):
    with pytest.raises(ConnectionError):
        train("shuffled", {}, tmp_path, 3, 13)
    path = newest_valid_checkpoint(tmp_path)
    content = torch.load(path, weights_only=True)
    content["callbacks"]["paceline"]["positions"] *= 2
    start = tmp_path / "of-two.ckpt"
    torch.save(content, start)
    weights, _ = train("shuffled", {}, start=start)
    resumed, _ = train("shuffled", {}, tmp_path / "again", start=start)
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)


class Counted(Module):
    paceline: ClassVar = {"units": {"words": lambda batch: torch.tensor(255, dtype=torch.bfloat16)}}


class Accounts(pl.Callback):
    def on_train_end(self, trainer, module):
        (self.account,) = [each for each in trainer.callbacks if isinstance(each, StepAccount)]


@pytest.mark.filterwarnings("ignore")  # Lightning's advice
def test_units_in_tensors_are_added_exactly(tmp_path):
    accounts = Accounts()
    train("shuffled", {"log_every_n_steps": 5}, tmp_path, callbacks=[accounts], kind=Counted)
    assert accounts.account.num_units == {"words": 255 * NUM_EPOCHS * NUM_BATCHES}


class Skipping(Module):
    """Ends each epoch at its fifth batch."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 5 else None


@pytest.mark.filterwarnings("ignore")  # Lightning's advice
def test_a_batch_that_a_hook_skips_is_not_counted(tmp_path):
    accounts = Accounts()
    train("shuffled", {}, tmp_path, callbacks=[accounts], kind=Skipping)
    assert sum(accounts.account.window_samples) == 5 * 8 * NUM_EPOCHS


class Averaging(Module):
    """Averages weights in its own hook of a batch's end, and draws a random number there."""

    def __init__(self, loader):
        super().__init__(loader)
        self.register_buffer("average", torch.zeros(8, 4))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.average.lerp_(self.net[0].weight.detach(), float(torch.rand(())))


class Ending(Module):
    """Ends its first epoch in its own hook of the third batch's end, where a checkpoint may be due."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.fit_loop.total_batch_idx == 2:
            raise StopIteration


class Lacking(Module):
    """Has a batch of each epoch without a usable sample, which Lightning leaves out."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return None if self.trainer.training and self.trainer.fit_loop.batch_idx == 1 else batch


class Fetching(Module):
    """Fetches its batches itself."""

    def training_step(self, dataloader_iter):
        return super().training_step(*next(dataloader_iter)[:2])

    def log(self, *args, **options):
        super().log(*args, batch_size=8, **options)


class Lossless(Module):
    """Has a first batch without a usable sample, and returns no loss."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return None if self.trainer.training and self.trainer.fit_loop.total_batch_idx == -1 else batch

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore")  # Lightning's advice
def test_a_step_without_a_loss_is_refused_after_a_first_batch_that_is_none(tmp_path):
    with pytest.raises(InputError, match="returned None"):
        train("shuffled", {}, tmp_path, kind=Lossless)


class Stopping(Module):
    """Asks for a stop in the sixth batch, and may lose a rank in the validation after a batch."""

    lost_after = None

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.fit_loop.total_batch_idx == 5:
            self.trainer.should_stop = True

    def on_validation_start(self):
        if self.trainer.fit_loop.total_batch_idx == self.lost_after:
            raise ConnectionError("a rank is lost")


@pytest.mark.filterwarnings("ignore")  # Lightning's advice
@pytest.mark.parametrize("every", [3, None])
@pytest.mark.parametrize(
    ("kind", "options", "stops"),
    [
        (Averaging, {}, [13]),
        (Skipping, {}, [10]),
        (Skipping, {}, [16]),
        (Ending, {}, [5]),
        (Lacking, {}, [14]),
        (Fetching, {}, [5, 7]),
        (Stopping, {"min_epochs": 2}, [7]),
        (Stopping, {"min_steps": 12}, [7]),
        (Stopping, {"min_steps": 12}, [11]),
    ],
)
def test_hooks_and_steps_of_a_batch_have_the_same_effects_after_a_resume(tmp_path, kind, options, stops, every):
    weights, curve = train("shuffled", options, kind=kind)
    for stop_at in stops:
        with pytest.raises(ConnectionError):
            train("shuffled", options, tmp_path, every, stop_at, kind=kind)
    resumed, rest = train("shuffled", options, tmp_path, every, kind=kind)
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)
    first = min(step for name, step in rest if name == "loss_step")
    expected, found = (
        {key: value for key, value in each.items() if key[1] >= first and not key[0].endswith("_epoch")}
        for each in (curve, rest)
    )
    assert found == expected


@pytest.mark.filterwarnings("ignore")  # Lightning's advice
@pytest.mark.parametrize(
    ("loader", "options", "every", "lost_after"),
    [("shuffled", {}, 3, 5), ("without length", READ_AHEAD | {"min_epochs": 2}, 4, 7)],
)
def test_a_training_that_is_lost_in_a_validation_validates_again(
    tmp_path, monkeypatch, loader, options, every, lost_after
):
    weights, curve = train(loader, options, kind=Stopping)
    monkeypatch.setattr(Stopping, "lost_after", lost_after)
    with pytest.raises(ConnectionError):
        train(loader, options, tmp_path, every, kind=Stopping)
    monkeypatch.undo()
    resumed, rest = train(loader, options, tmp_path, every, kind=Stopping)
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)
    assert rest["val_loss", lost_after] == curve["val_loss", lost_after]


class Keeper(pl.Callback):
    """Keeps an object in the checkpoint that torch does not load as plain values."""

    def on_save_checkpoint(self, trainer, module, checkpoint):
        checkpoint["kept"] = self.kept

    def __init__(self, kept):
        self.kept = kept


@pytest.mark.filterwarnings("ignore")  # Lightning's advice
@pytest.mark.parametrize(("kept", "note"), [({"plain": 1}, ""), (partial(int, "7"), "(functools.partial)")])
def test_checkpoints_that_no_restart_can_read_are_noted(tmp_path, kept, note):
    train("shuffled", {}, tmp_path / "checkpoints", 3, callbacks=[Keeper(kept)], progress=tmp_path / "progress.json")
    noted = " ".join(json.loads((tmp_path / "progress.json").read_text())["notes"])
    assert note in noted
    assert bool(noted) == bool(note)


@pytest.mark.filterwarnings("ignore")  # Lightning's advice
@pytest.mark.parametrize(
    ("loader", "options", "every", "stop_at"),
    [
        ("shuffled", {}, None, 13),
        ("shuffled", {"limit_val_batches": 0}, None, 17),
        ("shuffled", {"accumulate_grad_batches": 2}, 3, 13),
        ("shuffled", {"max_steps": 20}, None, 18),
        ("own generator", {"check_val_every_n_epoch": 2}, 5, 19),
        ("own generators of the dataset", {}, None, 13),
        ("own generators of the dataset", {}, 3, 13),
        ("own generator inside a batch sampler", {}, None, 13),
        ("own generator inside a batch sampler", {}, 3, 13),
        ("with state", {}, None, 13),
        ("with state", {}, 3, 13),
        pytest.param("of torchdata", {}, 3, 13, marks=NEEDS_TORCHDATA),
        pytest.param("of torchdata, without length", READ_AHEAD, 3, 13, marks=NEEDS_TORCHDATA),
        ("with state, without length", {}, 3, 13),
        ("with state, without length", READ_AHEAD, None, 13),
        ("with state, without length", READ_AHEAD, 3, 13),
        ("with state, without length", READ_AHEAD, 7, 7),
        ("without length", {}, None, 13),
        ("without length", {}, 3, 12),
        ("without length", READ_AHEAD, 3, 12),
        ("own generator", {"reload_dataloaders_every_n_epochs": 1}, 3, 13),
        ("own generator", {"reload_dataloaders_every_n_epochs": 1}, None, 13),
        ("several", {}, None, 13),
        ("several", {}, 3, 19),
        ("persistent workers", {}, 3, 5),
        ("persistent workers", {}, 3, 13),
        ("persistent workers", {}, None, 13),
        ("persistent workers, equal samples", {"reload_dataloaders_every_n_epochs": 1}, None, 13),
        ("several persistent", {}, None, 13),
        pytest.param("of torchdata, persistent", {}, 3, 13, marks=NEEDS_TORCHDATA),
        pytest.param("of torchdata, persistent", {}, None, 13, marks=NEEDS_TORCHDATA),
    ],
)
def test_a_resumed_training_is_that_of_lightning_without_interruption(tmp_path, loader, options, every, stop_at):
    weights, curve = train(loader, options)
    with pytest.raises(ConnectionError):
        train(loader, options, tmp_path / "checkpoints", every, stop_at)
    kept = " ".join(path.name for path in (tmp_path / "checkpoints").iterdir())
    progress = tmp_path / "progress.json"
    resumed, rest = train(loader, options, tmp_path / "checkpoints", every, progress=progress)
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)
    if loader.startswith("several"):
        assert {int(step) for step in STEP.findall(kept)} <= {NUM_BATCHES, 2 * NUM_BATCHES}, "ends of epochs only"
    noted = WORKERS in json.loads(progress.read_text())["notes"]
    assert noted == ("persistent" in loader and not options and stop_at > NUM_BATCHES)
    # means over an epoch that was resumed inside cover the batches since then
    exact = {key: value for key, value in rest.items() if every is None or not key[0].endswith("_epoch")}
    assert {name for name, _ in exact} >= {"loss_step"}
    assert {key: curve.get(key) for key in exact} == exact


@pytest.mark.filterwarnings("ignore")  # Lightning's advice
@pytest.mark.parametrize("loader", ["shuffled", "own generator"])
@pytest.mark.parametrize("stop_at", [5, 13])
def test_a_hook_that_reads_the_loader_does_not_change_a_resume_inside_an_epoch(tmp_path, loader, stop_at):
    kind = type("Looking", (Looks, Module), {})
    weights, _ = train(loader, {}, kind=kind)
    with pytest.raises(ConnectionError):
        train(loader, {}, tmp_path / "checkpoints", 3, stop_at, kind=kind)
    resumed, _ = train(loader, {}, tmp_path / "checkpoints", 3, kind=kind)
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)


@pytest.mark.filterwarnings("ignore")  # Lightning's advice
@pytest.mark.parametrize(
    ("monitor", "interval", "options", "every", "stop_at"),
    [
        ("loss_epoch", "epoch", {}, None, 13),
        ("val_loss", "epoch", {}, None, 13),
        ("val_loss", "epoch", {}, 3, 5),
        ("val_loss", "epoch", {"max_steps": 24}, None, 13),
        ("val_loss", "epoch", {"max_epochs": 4, "check_val_every_n_epoch": 2}, None, 25),
        ("loss_step", "step", {}, 3, 13),
        ("loss_step", "step", {"accumulate_grad_batches": 2}, 3, 13),
        ("loss_step", "step", {}, None, 13),
    ],
)
def test_a_resumed_training_lowers_the_learning_rate_as_without_interruption(
    tmp_path, monitor, interval, options, every, stop_at
):
    kind = partial(Plateau, monitor=monitor, interval=interval)
    rates = []
    for directory, batch in ((None, None), (tmp_path, stop_at), (tmp_path, None)):
        curve, monitored = Curve(), pl.callbacks.LearningRateMonitor()
        more = options | {"logger": curve, "num_sanity_val_steps": 0}
        if directory is None:
            weights, _ = train("shuffled", more | {"callbacks": [monitored]}, kind=kind)
        elif batch:
            with pytest.raises(ConnectionError):
                train("shuffled", more, directory, every, batch, callbacks=[monitored], kind=kind)
        else:
            resumed, _ = train("shuffled", more, directory, every, callbacks=[monitored], kind=kind)
        rates.append({key: value for key, value in curve.metrics.items() if key[0] == "lr-Adam"})
    whole, _, rest = rates
    assert len(set(whole.values())) > 1
    assert rest == {key: whole[key] for key in rest}
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)
