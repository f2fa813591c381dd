"""The user's own callbacks in a rank, compared with Lightning alone: ModelCheckpoint, and starts of epochs."""

from errno import ENOSPC
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

from paceline.tasks.report.summary import summary_table
from paceline.tasks.train.lightning.cli import ModuleCLI
from paceline.tasks.train.lightning.code import copy_own
from paceline.tasks.train.lightning.feed import FedDevice
from paceline.tasks.train.rank.checkpoint import newest_valid_checkpoint, step_of
from paceline.tasks.train.rank.user_callbacks import call_epoch_start_hooks
from tests.support.own_lightning import QUIET, train
from tests.support.refusals import refused

pytest.importorskip("jsonargparse", reason="LightningCLI needs it; infra/install brings it")
pytestmark = [pytest.mark.usefixtures("own_packages"), pytest.mark.filterwarnings("ignore")]  # Lightning's advice

BEST = {"monitor": "val/accuracy", "mode": "max", "save_top_k": 2, "save_last": True}


@pytest.fixture
def settings():
    """Settings of a training of three epochs with a callback that keeps two models."""
    torch.set_num_threads(1)
    callback = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": BEST.copy()}
    return {
        "seed_everything": 3,
        "model": {"class_path": "more_shapes.Perceptron"},
        "data": {"class_path": "more_shapes.Pictures"},
        "trainer": {"max_epochs": 3, "accelerator": "cpu", "devices": 1, "callbacks": [callback]},
    }


def files_of(directory):
    """Names of the files that a callback has kept."""
    return {path.name for path in Path(directory).rglob("epoch*.ckpt")}


def keep_in(settings, directory):
    """Set the directory of the callback."""
    settings["trainer"]["callbacks"][0]["init_args"]["dirpath"] = str(directory)


def test_the_files_are_those_of_lightning_alone(settings, make_spec, tmp_path):
    keep_in(settings, tmp_path / "plain")
    cli = ModuleCLI(settings, QUIET | {"enable_checkpointing": True})
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    alone = cli.trainer.checkpoint_callback
    keep_in(settings, tmp_path / "ours")
    result = train(make_spec(settings=settings, baseline="none"))
    assert files_of(tmp_path / "ours") == files_of(tmp_path / "plain")
    (best,) = result.best_models
    assert (best.monitor, best.score) == ("val/accuracy", float(alone.best_model_score))
    assert Path(best.path) == tmp_path / "ours" / Path(alone.best_model_path).name
    kept, expected = (torch.load(path, weights_only=True) for path in (best.path, alone.best_model_path))
    assert all(torch.equal(kept["state_dict"][name], weights) for name, weights in expected["state_dict"].items())
    assert kept["optimizer_states"][0]["param_groups"] == expected["optimizer_states"][0]["param_groups"]
    assert (tmp_path / "ours" / "last.ckpt").exists()
    assert result.time_budget["checkpoint"] > 0


def test_the_best_model_has_an_absolute_path(settings, make_spec, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings["trainer"] |= {"max_epochs": 1, "default_root_dir": "models"}
    (best,) = train(make_spec(settings=settings, baseline="none")).best_models
    assert Path(best.path).is_relative_to(tmp_path / "models")
    assert Path(best.path).exists()


def test_a_folder_that_cannot_be_written_is_refused_before_the_first_step(settings, make_spec, tmp_path, monkeypatch):
    from more_shapes import Perceptron

    steps = []
    monkeypatch.setattr(Perceptron, "training_step", lambda *arguments: steps.append(arguments))
    (tmp_path / "file").touch()
    keep_in(settings, tmp_path / "file" / "models")
    with refused("dirpath", "ModelCheckpoint", f"dirpath={tmp_path}/file/models"):
        train(make_spec(settings=settings, baseline="none"))
    assert steps == []


def test_what_lightning_refuses_is_an_error_of_the_input_with_which_no_restart_would_help(settings, make_spec):
    (callback,) = settings["trainer"]["callbacks"]
    settings["trainer"] |= {"max_epochs": 1, "callbacks": [callback, callback]}
    with refused("trainer.callbacks", "ModelCheckpoint", "state_key"):
        train(make_spec(settings=settings, baseline="none"))
    callback["init_args"]["monitor"] = "unknown"
    settings["trainer"]["callbacks"] = [callback]
    with refused(None, "monitor='unknown'") as refusal:
        train(make_spec(settings=settings, baseline="none", attempt=1))
    assert "self.log" in refusal.value.hint


def test_a_resume_continues_with_what_was_kept_and_forgets_what_is_gone(settings, make_spec):
    whole = make_spec(settings=settings, baseline="none")
    (best,) = train(whole).best_models
    kept = files_of(Path(whole.checkpoint_directory).parent)
    assert len(kept) == BEST["save_top_k"]
    settings["trainer"]["max_epochs"] = 2
    spec = make_spec(settings=settings, baseline="none", attempt=1)
    first = train(spec)
    gone = first.best_models[0].path
    settings["trainer"]["max_epochs"] = 3
    later = {"resume_from": first.checkpoint, "checkpoint_directory": spec.checkpoint_directory}
    resumed = train(make_spec(settings=settings, baseline="none", attempt=2).model_copy(update=later))
    assert files_of(Path(spec.checkpoint_directory).parent) == kept
    assert resumed.best_models[0].score == best.score
    Path(gone).unlink(missing_ok=True)
    again = train(make_spec(settings=settings, baseline="none", attempt=3).model_copy(update=later))
    assert again.best_models[0].path != gone
    assert Path(again.best_models[0].path).exists()


NEWEST = {"every_n_train_steps": 3, "save_last": True, "filename": "newest-{step}"}


@pytest.mark.parametrize(
    ("checkpoint_steps", "is_late", "arguments", "steps"),
    [
        ("auto", False, NEWEST, [18, 18]),
        (4, False, NEWEST, [18, 18]),
        (4, True, NEWEST, [18, 18]),
        (4, False, {"every_n_train_steps": 1, "save_top_k": -1}, [*range(1, 19)]),
    ],
    ids=["no checkpoint before", "a checkpoint before", "states that are restored late", "all files"],
)
def test_files_of_steps_that_are_repeated_are_replaced(
    settings, make_spec, monkeypatch, tmp_path, checkpoint_steps, is_late, arguments, steps
):
    from more_shapes import Perceptron

    def fail(self, batch, batch_idx):
        if self.trainer.fit_loop.total_batch_idx == 10:
            raise ConnectionError("in the second epoch")
        return step(self, batch, batch_idx)

    step, settings["trainer"]["callbacks"][0]["init_args"] = Perceptron.training_step, dict(arguments)
    settings["trainer"]["limit_train_batches"] = 6
    monkeypatch.setattr(FedDevice, "restore_checkpoint_after_setup", is_late)  # as with shared weights
    options = {"baseline": "none", "execution": {"checkpoint_steps": checkpoint_steps}}
    kept = []
    for attempt, directory in enumerate(("whole", "lost")):
        keep_in(settings, tmp_path / directory)
        spec = make_spec(settings=settings, attempt=attempt, **options)
        if directory == "lost":
            monkeypatch.setattr(Perceptron, "training_step", fail)
            with pytest.raises(ConnectionError):
                train(spec)
            monkeypatch.setattr(Perceptron, "training_step", step)
            newest = newest_valid_checkpoint(Path(spec.checkpoint_directory))
            assert (newest is None) is (checkpoint_steps == "auto")
            restart = {
                "resume_from": str(newest) if newest else None,
                "checkpoint_directory": spec.checkpoint_directory,
            }
            spec = make_spec(settings=settings, attempt=2, **options).model_copy(update=restart)
        train(spec)
        files = sorted((tmp_path / directory).iterdir())
        kept.append({path.name: torch.load(path, weights_only=True)["global_step"] for path in files})
    assert kept[0] == kept[1]
    assert sorted(kept[1].values()) == steps


def files_with_steps(directory):
    """The step of each file that a callback has kept, and whether the file is a link."""
    steps = lambda path: torch.load(path, weights_only=True)["global_step"]  # noqa: E731
    return {path.name: (steps(path), path.is_symlink()) for path in Path(directory).iterdir()}


RISING = {"monitor": "number", "save_last": True}
DEFERRED = {"monitor": "number", "every_n_train_steps": 3, "save_top_k": -1}


@pytest.mark.parametrize(
    ("arguments", "trainer", "stop_at", "kept"),
    [
        (RISING, {}, 10, {"epoch=0-step=6.ckpt": (6, False), "last.ckpt": (6, False)}),
        (RISING | {"save_last": "link"}, {}, 10, {"epoch=0-step=6.ckpt": (6, False), "last.ckpt": (6, True)}),
        (
            DEFERRED,
            {"max_epochs": 1, "limit_train_batches": 8, "val_check_interval": 4},
            3,
            {f"epoch=0-step={n}.ckpt": (n, False) for n in (4, 6)},
        ),
    ],
    ids=["the last file", "a link", "a save after the validation"],
)
def test_a_restart_saves_when_an_undisturbed_training_does(
    settings, make_spec, monkeypatch, tmp_path, arguments, trainer, stop_at, kept
):
    from more_shapes import Perceptron

    def step(self, batch, batch_idx):
        if self.trainer.fit_loop.total_batch_idx == stop_at and not is_lost:
            is_lost.append(True)
            raise ConnectionError("once")
        return trained(self, batch, batch_idx)

    is_lost, trained = [], Perceptron.training_step
    monkeypatch.setattr(Perceptron, "training_step", step)
    validate = lambda self, batch, batch_idx: self.log("number", float(self.global_step))  # noqa: E731
    monkeypatch.setattr(Perceptron, "validation_step", validate)
    settings["trainer"]["callbacks"][0]["init_args"] = arguments | {"dirpath": str(tmp_path / "kept")}
    settings["trainer"] |= {"limit_train_batches": 6} | trainer
    spec = make_spec(settings=settings, baseline="none", execution={"checkpoint_steps": 3})
    with pytest.raises(ConnectionError):
        train(spec)
    newest = newest_valid_checkpoint(Path(spec.checkpoint_directory))
    train(spec.model_copy(update={"resume_from": str(newest)}))
    assert files_with_steps(tmp_path / "kept") == kept


@pytest.mark.parametrize(("error", "parts"), [(OSError(ENOSPC, "full"), []), (RuntimeError("killed"), [b"part"])])
def test_a_part_of_a_file_is_replaced(settings, make_spec, monkeypatch, tmp_path, error, parts):
    def save(self, checkpoint, path, storage_options=None):
        if Path(path).name == "epoch=1-step=10.ckpt" and not lost:
            lost.append(Path(path))
            Path(path).write_bytes(b"part")
            raise error
        write(self, checkpoint, path, storage_options)

    lost, write = [], TorchCheckpointIO.save_checkpoint
    monkeypatch.setattr(TorchCheckpointIO, "save_checkpoint", save)
    settings["trainer"]["callbacks"][0]["init_args"] = {"every_n_train_steps": 2, "save_top_k": -1}
    settings["trainer"] |= {"max_epochs": 2, "limit_train_batches": 6}
    keep_in(settings, tmp_path / "kept")
    spec = make_spec(settings=settings, baseline="none", execution={"checkpoint_steps": 3})
    with pytest.raises(type(error)):
        train(spec)
    assert [path.read_bytes() for path in lost if path.exists()] == parts
    newest = newest_valid_checkpoint(Path(spec.checkpoint_directory))
    train(spec.model_copy(update={"resume_from": str(newest)}))
    files = files_with_steps(tmp_path / "kept")
    assert files == {f"epoch={(step - 1) // 6}-step={step}.ckpt": (step, False) for step in range(2, 13, 2)}


@pytest.mark.parametrize("is_lost", [False, True])
def test_the_file_that_a_training_starts_from_stays(settings, make_spec, monkeypatch, tmp_path, is_lost):
    from more_shapes import Perceptron

    def fail(self, batch, batch_idx):
        if self.trainer.fit_loop.total_batch_idx == 10:
            raise ConnectionError("before the file would be removed")
        return step(self, batch, batch_idx)

    step = Perceptron.training_step
    settings["trainer"] |= {"max_epochs": 1, "limit_train_batches": 6}
    settings["trainer"]["callbacks"][0]["init_args"] = {"dirpath": str(tmp_path / "kept")}
    train(make_spec(settings=settings, baseline="none"))
    (start,) = (tmp_path / "kept").iterdir()
    settings["trainer"]["max_epochs"] = 3
    spec = make_spec(settings=settings, attempt=1, baseline="none", execution={"checkpoint_steps": 2})
    own = spec.config.lightning.model_copy(update={"ckpt_path": str(start)})
    spec = spec.model_copy(update={"config": spec.config.model_copy(update={"lightning": own})})
    copy_own(own, tmp_path / "runs" / spec.run_id)
    if is_lost:
        monkeypatch.setattr(Perceptron, "training_step", fail)
        with pytest.raises(ConnectionError):
            train(spec)
        monkeypatch.setattr(Perceptron, "training_step", step)
        newest = newest_valid_checkpoint(Path(spec.checkpoint_directory))
        spec = spec.model_copy(update={"resume_from": str(newest)})
    train(spec)
    last = start.with_name("epoch=2-step=18.ckpt")
    assert {*(tmp_path / "kept").iterdir()} == {start, last}, "as with Lightning alone"


def test_files_of_a_checkpoint_stay_though_the_directory_is_another_one_later(settings, make_spec, tmp_path):
    settings["trainer"]["max_epochs"] = 2
    keep_in(settings, tmp_path / "first")
    spec = make_spec(settings=settings, baseline="none")
    first = train(spec)
    files = files_of(tmp_path / "first")
    settings["trainer"]["max_epochs"] = 3
    keep_in(settings, tmp_path / "second")
    later = {"resume_from": first.checkpoint, "checkpoint_directory": spec.checkpoint_directory}
    train(make_spec(settings=settings, baseline="none", attempt=1).model_copy(update=later))
    assert files_of(tmp_path / "first") == files
    assert files_of(tmp_path / "second")


@pytest.mark.parametrize("baseline", ["probe", "none"])
def test_one_of_the_module_saves_in_the_training_alone(settings, make_spec, monkeypatch, baseline):
    from more_shapes import Perceptron

    saved = []

    class Watched(ModelCheckpoint):
        def _save_checkpoint(self, trainer, filepath):
            saved.append(trainer.current_epoch)
            super()._save_checkpoint(trainer, filepath)

    del settings["trainer"]["callbacks"]
    callback = {"every_n_train_steps": 1, "save_top_k": -1}
    monkeypatch.setattr(Perceptron, "configure_callbacks", lambda self: Watched(**callback), raising=False)
    spec = make_spec(settings=settings, baseline=baseline)
    result = train(spec)
    assert len(saved) == result.num_batches
    assert len(files_of(Path(spec.checkpoint_directory).parent)) == result.num_batches
    assert result.best_models[0].monitor is None
    assert (result.probe is not None) is (baseline == "probe")


@pytest.mark.parametrize("has_one", [True, False])
def test_a_module_that_reads_the_callback_has_a_probe(settings, make_spec, monkeypatch, has_one):
    from more_shapes import Perceptron

    start = lambda self: folders.append(Path(self.trainer.checkpoint_callback.dirpath))  # noqa: E731
    monkeypatch.setattr(Perceptron, "on_train_start", start, raising=False)
    folders = []
    if not has_one:
        del settings["trainer"]["callbacks"]
    result = train(make_spec(settings=settings, baseline="probe"))
    assert result.probe is not None
    assert len(folders) > 1
    kept = [path.parent for path in Path(result.checkpoint).parents[1].rglob("epoch*.ckpt")]
    assert {*kept} == ({folders[-1]} if has_one else set())


class Section(LightningCLI):
    """Has the callback's arguments as a section."""

    def add_arguments_to_parser(self, parser):
        parser.add_lightning_class_args(ModelCheckpoint, "my_checkpoint")


class Default(LightningCLI):
    """Gives the callback to its trainer."""

    def __init__(self, *args, **settings):
        super().__init__(*args, trainer_defaults={"callbacks": ModelCheckpoint()}, **settings)


@pytest.mark.parametrize("script", [Section, Default])
def test_one_of_a_command_line_of_its_own_is_part_of_the_training_alone(settings, monkeypatch, script):
    import optimizers

    monkeypatch.setattr(optimizers, "LinkedCLI", script)
    own = {"model": {"class_path": "optimizers.Regression"}, "cli": {"class_path": "optimizers.LinkedCLI"}}
    for is_training in (True, False):
        options = {"enable_checkpointing": is_training, "enable_progress_bar": False, "accelerator": "cpu"}
        callbacks = ModuleCLI(own, options).trainer.callbacks
        assert any(isinstance(each, ModelCheckpoint) for each in callbacks) is is_training


def test_the_trainer_names_the_newest_checkpoint_where_the_user_has_no_callback(settings, make_spec, monkeypatch):
    from more_shapes import Perceptron

    named = []
    ends = lambda self: named.append(self.trainer.checkpoint_callback.best_model_path)  # noqa: E731
    monkeypatch.setattr(Perceptron, "on_fit_end", ends, raising=False)
    del settings["trainer"]["callbacks"]
    result = train(make_spec(settings=settings, baseline="none"))
    assert named == [result.checkpoint]
    assert result.best_models == ()


class Dropping(Callback):
    """Sets a dropout that no checkpoint holds."""

    def on_train_epoch_start(self, trainer, pl_module):
        pl_module.layers[3].p = 0.3 * trainer.current_epoch
        self.log("dropout", pl_module.layers[3].p)


class Counting(Callback):
    """Counts epochs in a state of its own."""

    number = 0

    def on_train_epoch_start(self, trainer, pl_module):
        self.number += 1

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


def test_a_resume_inside_an_epoch_sets_what_its_start_set(settings, make_spec, monkeypatch):
    from more_shapes import Perceptron

    def start(self):
        self.layers[1].bias.data.mul_(0.5)  # which a checkpoint holds
        self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.9
        self.log("halved", 1.0)

    def fail(self, batch, batch_idx):
        if self.trainer.fit_loop.total_batch_idx == 11:
            raise ConnectionError("in the second epoch")
        return step(self, batch, batch_idx)

    counting, step = Counting(), Perceptron.training_step
    accumulating = GradientAccumulationScheduler({0: 1, 1: 2})
    given = lambda self: [Dropping(), counting, accumulating]  # noqa: E731
    monkeypatch.setattr(Perceptron, "configure_callbacks", given, raising=False)
    monkeypatch.setattr(Perceptron, "on_train_epoch_start", start, raising=False)
    settings["trainer"] |= {"callbacks": [], "limit_train_batches": 8}
    whole = train(make_spec(settings=settings, baseline="none"))
    counting.number = 0
    spec = make_spec(settings=settings, baseline="none", attempt=1, execution={"checkpoint_steps": 2})
    monkeypatch.setattr(Perceptron, "training_step", fail)
    with pytest.raises(ConnectionError):
        train(spec)
    monkeypatch.setattr(Perceptron, "training_step", step)
    checkpoint = newest_valid_checkpoint(Path(spec.checkpoint_directory))
    assert step_of(checkpoint) == 10, "inside the second epoch"
    counting.number = 0
    again = make_spec(settings=settings, baseline="none", attempt=2)
    resumed = train(again.model_copy(update={"resume_from": str(checkpoint)}))
    assert resumed.losses == whole.losses
    assert resumed.num_steps == whole.num_steps
    assert counting.number == 3
    trained, expected = (torch.load(each.checkpoint, weights_only=True)["state_dict"] for each in (resumed, whole))
    assert all(torch.equal(trained[name], weights) for name, weights in expected.items())


def test_a_score_that_is_not_finite_is_none(settings, make_spec, monkeypatch):
    from more_shapes import Perceptron

    validate = lambda self, batch, batch_idx: self.log("val/accuracy", torch.tensor(torch.nan))  # noqa: E731
    monkeypatch.setattr(Perceptron, "validation_step", validate)
    (best,) = train(make_spec(settings=settings, baseline="none")).best_models
    assert (best.monitor, best.score) == ("val/accuracy", None)
    newest = best.model_copy(update={"monitor": None, "path": "last.ckpt"})
    rows = summary_table({"train": {"best_models": [best.model_dump(), newest.model_dump()]}})
    shown = [text for name, text in rows if name == "best model"]
    assert shown == [f"val/accuracy not finite: {best.path}", "newest: last.ckpt"]


class Remembering(Callback):
    """Resets a sum at the start of an epoch, which its hooks of checkpoints keep."""

    total = 0.0

    def on_train_epoch_start(self, trainer, pl_module):
        self.total = 0.0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.total += float(outputs["loss"])

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        checkpoint["total"] = self.total

    def on_load_checkpoint(self, trainer, pl_module, checkpoint):
        self.total = checkpoint["total"]


class Remembered(nn.Module):
    """Has a number that is no tensor in its state."""

    number = 0

    def get_extra_state(self):
        return self.number

    def set_extra_state(self, state):
        self.number = state


def trainer_of(module, *callbacks):
    """What a resume sees of a trainer."""
    optimizer = torch.optim.Adam(module.parameters(), lr=torch.tensor(0.5), capturable=True)
    config = SimpleNamespace(scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1))
    return SimpleNamespace(
        lightning_module=module, callbacks=[*callbacks], optimizers=[optimizer], lr_scheduler_configs=[config]
    )


def test_a_state_of_checkpoints_is_not_reset_by_the_start_of_an_epoch():
    class Started(BoringModel):
        def __init__(self):
            super().__init__()
            self.inner, self.started = Remembered(), 0

        def on_train_epoch_start(self):
            self.started += 1
            self.inner.number = 0
            trainer.optimizers[0].param_groups[0]["lr"].mul_(0.5)
            trainer.lr_scheduler_configs[0].scheduler.step()
            self.layer.weight.data.zero_()

    class Kept(Started):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["started"] = self.started

    callback = Remembering()
    for kind, number in ((Started, 1), (Kept, 0)):
        module = kind()
        module.inner.number, callback.total = 7, 1.5
        weights = module.layer.weight.detach().clone()
        trainer = trainer_of(module, callback)
        call_epoch_start_hooks(trainer)
        assert module.started == number
        assert (module.inner.number, callback.total) == (7, 1.5)
        assert trainer.optimizers[0].param_groups[0]["lr"] == 0.5
        assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 0
        assert torch.equal(module.layer.weight, weights)


def test_nothing_is_logged_twice_by_the_start_of_an_epoch():
    class Logging(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            logged.append("called")
            pl_module.log("epoch", 1.0)
            pl_module.log_dict({"epochs": 1.0})
            self.log("epoch", 1.0)

    logged, module, callback = [], BoringModel(), Logging()
    for owner in (module, callback):  # as a trainer does to callbacks
        owner.log = owner.log_dict = lambda *args, **options: logged.append("logged")
    call_epoch_start_hooks(trainer_of(module, callback))
    assert logged == ["called"]
    module.log("later", 1.0)
    assert logged == ["called", "logged"]


def test_the_newest_file_without_a_metric_is_forgotten_if_it_is_gone(settings, make_spec):
    settings["trainer"]["callbacks"][0]["init_args"] = {}
    settings["trainer"]["max_epochs"] = 2
    spec = make_spec(settings=settings, baseline="none")
    first = train(spec)
    (kept,) = first.best_models
    Path(kept.path).unlink()
    later = {"resume_from": first.checkpoint, "checkpoint_directory": spec.checkpoint_directory}
    again = make_spec(settings=settings, baseline="none", attempt=1).model_copy(update=later)
    assert train(again).best_models == ()
