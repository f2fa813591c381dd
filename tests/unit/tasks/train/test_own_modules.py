"""Own modules in a rank, compared with Lightning alone: the test loop, optimizers, flags of `self.log`."""

import csv
import importlib.util
import inspect
import json
import re
import sys
from collections import defaultdict
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import (
    Callback,
    ProgressBar,
    RichProgressBar,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger

from paceline.tasks.errors import RunError
from paceline.tasks.metrics_file import FILE
from paceline.tasks.names import metric_name
from paceline.tasks.records.measurement import Measurement
from paceline.tasks.train.lightning.child import Request, _do
from paceline.tasks.train.lightning.cli import ModuleCLI
from paceline.tasks.train.lightning.measure import measure_module
from paceline.tasks.train.rank.time_budget import Stopwatch
from tests.support.documents import ROOT
from tests.support.own_lightning import PACKAGE, QUIET, train
from tests.support.refusals import refused

pytest.importorskip("jsonargparse", reason="LightningCLI needs it; infra/install brings it")
pytestmark = [pytest.mark.usefixtures("own_packages"), pytest.mark.filterwarnings("ignore")]  # Lightning's advice

HAS_TIMM = importlib.util.find_spec("timm") is not None


@pytest.fixture
def pictures():
    """Settings of a module with a test loop."""
    return {
        "seed_everything": 3,
        "model": {"class_path": "more_shapes.Perceptron"},
        "data": {"class_path": "more_shapes.Pictures"},
        "trainer": {"max_epochs": 1, "accelerator": "cpu", "devices": 1},
    }


def test_a_test_step_is_run_after_the_training_with_the_metrics_of_lightning(pictures, make_spec):
    torch.set_num_threads(1)
    cli = ModuleCLI(pictures, QUIET)
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    trained = {name: float(value) for name, value in cli.trainer.callback_metrics.items()}
    (tested,) = cli.trainer.test(cli.model, datamodule=cli.datamodule, verbose=False)
    assert tested.keys() == {"test/loss"}
    result = train(make_spec(settings=pictures, baseline="none"))
    assert result.metrics == trained | tested
    assert result.not_tested is None
    assert result.time_budget["test"] > 0


@pytest.mark.parametrize("is_prepared", [True, False])
def test_data_are_prepared_once_for_training_validation_and_test(pictures, make_spec, monkeypatch, is_prepared):
    import more_shapes

    prepared = []
    for owner in (more_shapes.Pictures, more_shapes.Perceptron):
        monkeypatch.setattr(owner, "prepare_data", lambda self: prepared.append(type(self).__name__), raising=False)
    spec = make_spec(settings=pictures, baseline="none").model_copy(update={"is_prepared": is_prepared})
    assert train(spec).not_tested is None
    assert prepared == ([] if is_prepared else ["Pictures", "Perceptron"])


@pytest.mark.parametrize("error", [FileNotFoundError("no test set here"), SystemExit(3)])
def test_a_test_that_raises_leaves_a_training_and_its_reason(pictures, make_spec, monkeypatch, error):
    from more_shapes import Pictures

    def setup(self, stage):
        raise error

    prepare = Pictures.setup
    monkeypatch.setattr(Pictures, "setup", lambda self, stage: setup(self, stage) if stage == "test" else prepare(self))
    result = train(make_spec(settings=pictures, baseline="none"))
    assert result.not_tested == f"{type(error).__name__}: {error}"
    assert result.metrics.keys() == {"train/loss", "val/accuracy"}
    assert result.checkpoint is not None


def test_a_setup_that_builds_the_network_again_leaves_the_trained_weights(pictures, make_spec, monkeypatch):
    from more_shapes import Perceptron

    def setup(self, stage):
        self.layers = Perceptron().layers

    monkeypatch.setattr(Perceptron, "setup", setup, raising=False)
    result = train(make_spec(settings=pictures, baseline="none"))
    assert "built the network again" in result.not_tested
    assert "test/loss" not in result.metrics
    trained = torch.load(result.checkpoint, weights_only=True)["state_dict"]
    kept = torch.load(result.weights, weights_only=True)
    assert kept.keys() == trained.keys()
    assert all(torch.equal(kept[name], weights) for name, weights in trained.items())


def test_a_network_that_setup_builds_again_needs_no_test(pictures, make_spec, monkeypatch):
    from more_shapes import Perceptron

    def setup(self, stage):
        self.layers = Perceptron().layers

    monkeypatch.setattr(Perceptron, "setup", setup, raising=False)
    pictures["trainer"]["limit_test_batches"] = 0
    assert train(make_spec(settings=pictures, baseline="none")).not_tested is None, "as the message says"


def test_a_test_leaves_the_values_of_the_validation(pictures, make_spec, monkeypatch):
    from more_shapes import Perceptron

    def test_step(self, batch, batch_idx):
        self.log("val/accuracy", -1.0)
        self.log("test/one", 1.0)

    monkeypatch.setattr(Perceptron, "test_step", test_step)
    spec = make_spec(settings=pictures, baseline="none")
    result = train(spec)
    assert result.metrics["val/accuracy"] >= 0
    assert result.metrics["test/one"] == 1
    values = [json.loads(line)[:2] for line in (Path(spec.directory) / FILE).read_text().splitlines()]
    assert ["test/one", 1] in values
    assert [value for name, value in values if name == "val/accuracy"] == [result.metrics["val/accuracy"]]


def test_a_batch_that_is_none_is_not_counted(pictures, make_spec, monkeypatch):
    from more_shapes import Perceptron

    batches = count()
    lose = lambda self, batch, _: batch if not self.trainer.training or next(batches) not in (0, 3) else None  # noqa: E731
    monkeypatch.setattr(Perceptron, "on_before_batch_transfer", lose)
    monkeypatch.setattr(Perceptron, "paceline", {"units": {"images": lambda batch: len(batch[0])}}, raising=False)
    pictures["trainer"]["log_every_n_steps"] = 1
    result = train(make_spec(settings=pictures, baseline="none"))
    assert result.window_samples == (0, 16, 16, 0, *[16] * (result.num_batches - 4))
    assert result.units_per_second["images"] == pytest.approx(result.samples_per_second)
    assert result.samples_per_second == pytest.approx(16 * result.num_steps / sum(each[2] for each in result.windows))


def test_a_rank_that_was_lost_in_its_test_tests_again(pictures, make_spec):
    first = train(make_spec(settings=pictures, baseline="none"))
    again = make_spec(attempt=1, settings=pictures, baseline="none")
    result = train(again.model_copy(update={"resume_from": first.checkpoint}))
    assert result.num_batches == first.num_batches
    assert result.losses == first.losses
    assert result.metrics["test/loss"] == first.metrics["test/loss"]
    assert result.not_tested is None


def test_a_limit_of_the_trainer_leaves_the_test_out(pictures, make_spec):
    pictures["trainer"]["limit_test_batches"] = 0
    result = train(make_spec(settings=pictures, baseline="none"))
    assert result.metrics.keys() == {"train/loss", "val/accuracy"}
    assert result.not_tested is None


def noise(module, **trainer):
    """Settings of a module on noise."""
    return {
        "seed_everything": 3,
        "model": module,
        "data": {"class_path": "optimizers.Halves"},
        "trainer": {"max_epochs": 3, "log_every_n_steps": 1, "accelerator": "cpu", "devices": 1} | trainer,
    }


def compare_with_lightning(make_spec, settings, directory):
    """Train with Lightning and with Paceline; assert equal weights and logged values, and return these."""
    torch.set_num_threads(1)
    cli = ModuleCLI(settings, QUIET | {"logger": CSVLogger(directory, version=0)})
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    logged = defaultdict(list)
    with (directory / "lightning_logs" / "version_0" / "metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            for name in row.keys() - {"epoch", "step"}:
                logged[metric_name(name)] += [float(row[name])] if row[name] else []
    spec = make_spec(settings=settings, baseline="none")
    result = train(spec)
    trained = torch.load(result.checkpoint, weights_only=True)["state_dict"]
    assert all(torch.equal(trained[name], weights) for name, weights in cli.model.state_dict().items())
    values = defaultdict(list)
    for line in (Path(spec.directory) / FILE).read_text().splitlines():
        name, value, *_ = json.loads(line)
        values[name].append(value)
    assert {name: values[name] for name in logged} == logged
    return logged


@pytest.mark.parametrize(
    "trainer", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "val_check_interval": 3}]
)
def test_hooks_are_called_as_often_and_in_the_order_of_lightning(pictures, make_spec, trainer):
    import hooks

    torch.set_num_threads(1)
    pictures["model"]["class_path"], pictures["data"]["class_path"] = "hooks.Noted", "hooks.NotedData"
    pictures["trainer"] |= trainer
    hooks.CALLS.clear()
    cli = ModuleCLI(pictures, QUIET)
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    cli.trainer.test(cli.model, datamodule=cli.datamodule, verbose=False)
    expected = [*hooks.CALLS]
    assert {name.partition(".")[2] for name in expected} >= hooks.OF_MODULE - NOT_CALLED
    hooks.CALLS.clear()
    result = train(make_spec(settings=pictures, baseline="none"))
    assert result.not_tested is None
    assert expected == hooks.CALLS


NOT_CALLED = {name for name in dir(LightningModule) if "predict" in name}
"""Hooks of a prediction."""


FORMS = ("optimizer", "list", "tuple", "dict", "lists", "schedule", "step", "epoch", "plateau", "plateau_step", "none")


def test_all_forms_are_tried():
    import optimizers

    assert tuple(optimizers.FORMS) == FORMS


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_configure_optimizers_trains_as_with_lightning(make_spec, tmp_path, form):
    module = {"class_path": "optimizers.Optimized", "init_args": {"form": form}}
    logged = compare_with_lightning(make_spec, noise(module, limit_val_batches=0), tmp_path)
    first, *_, last = logged["loss_epoch"]
    assert (last == pytest.approx(first, rel=1e-4)) == (form == "none")


@pytest.mark.parametrize("name", ["TwoOptimizers", "Logged"])
def test_several_optimizers_and_all_flags_of_log_are_as_with_lightning(make_spec, tmp_path, name):
    logged = compare_with_lightning(make_spec, noise({"class_path": f"optimizers.{name}"}), tmp_path)
    assert len(logged["loss" if name == "TwoOptimizers" else "loss_step"]) == 30
    assert metric_name("not@logged") not in logged
    if name == "Logged":
        assert {
            "half_0",
            "half_1",
            "val_loss/dataloader_idx_1",
            metric_name("odd@name"),
            "metric_epoch",
        } <= logged.keys()


def test_a_time_limit_of_the_trainer_ends_a_training_with_a_checkpoint(pictures, make_spec):
    pictures["trainer"] |= {"max_epochs": -1, "max_time": {"seconds": 2}}
    result = train(make_spec(settings=pictures, baseline="none"))
    assert result.num_steps > 0
    assert torch.load(result.checkpoint, weights_only=True)["global_step"] == result.num_steps


def test_a_resume_calls_the_module_with_what_it_has_saved(pictures, make_spec, monkeypatch):
    from more_shapes import Perceptron

    def save(self, checkpoint):
        checkpoint["note"] = "saved"

    loaded = []
    monkeypatch.setattr(Perceptron, "on_save_checkpoint", save, raising=False)
    monkeypatch.setattr(Perceptron, "on_load_checkpoint", lambda self, kept: loaded.append(kept["note"]), raising=False)
    first = train(make_spec(settings=pictures, baseline="none"))
    assert not loaded
    pictures["trainer"]["max_epochs"] = 2
    spec = make_spec(settings=pictures, baseline="none", attempt=1)
    resumed = train(spec.model_copy(update={"resume_from": first.checkpoint}))
    assert loaded == ["saved"]
    assert resumed.num_epochs == 2


def test_a_resume_keeps_the_learning_rate_that_was_found(pictures, make_spec):
    finder = {"num_training_steps": 5, "min_lr": 1e-4, "max_lr": 0.1}
    callback = "lightning.pytorch.callbacks.LearningRateFinder"
    pictures["trainer"] |= {"callbacks": [{"class_path": callback, "init_args": finder}], "max_epochs": 2}
    whole = train(make_spec(settings=pictures, baseline="none"))
    pictures["trainer"]["max_epochs"] = 1
    first = train(make_spec(settings=pictures, baseline="none", attempt=1))
    pictures["trainer"]["max_epochs"] = 2
    spec = make_spec(settings=pictures, baseline="none", attempt=2)
    resumed = train(spec.model_copy(update={"resume_from": first.checkpoint}))
    assert resumed.num_batches == whole.num_batches == 2 * first.num_batches
    assert resumed.losses == whole.losses


def test_a_resume_with_a_batch_size_that_was_found_is_refused(pictures, make_spec):
    finder = {"class_path": "lightning.pytorch.callbacks.BatchSizeFinder", "init_args": {"max_trials": 1}}
    first = train(make_spec(settings=pictures, baseline="none"))
    pictures["trainer"]["callbacks"] = [finder]
    spec = make_spec(settings=pictures, baseline="none", attempt=1)
    with refused("trainer.callbacks", "BatchSizeFinder"):
        train(spec.model_copy(update={"resume_from": first.checkpoint}))


RECTIFY = torch.nn.ReLU()


class Rectified(LightningModule):
    """Has objects as defaults."""

    def __init__(
        self,
        activation: torch.nn.Module = RECTIFY,
        layers: Any = (RECTIFY, 1),
        width: int = 8,
        heads: dict[str, "Rectified"] | None = None,
    ) -> None:
        super().__init__()
        self.activation, self.layers, self.width, self.heads = activation, layers, width, heads


def test_objects_that_are_defaults_of_classes_are_those_of_the_ranks_too():
    averages = ["--trainer.callbacks+=StochasticWeightAveraging", "--trainer.callbacks.swa_lrs=0.1"]
    arguments = [f"--model={__name__}.Rectified", "--model.width=4", "--data=more_shapes.Pictures", *averages]
    head = {"class_path": f"{__name__}.Rectified", "init_args": {"width": 2}}
    parsed = ModuleCLI([*arguments, f"--model.heads={json.dumps({'a': head})}"], only_parse=True).settings()
    given = parsed["model"]["init_args"]
    assert given == {"width": 4, "heads": {"a": head | {"init_args": {"width": 2, "heads": None}}}}
    cli = ModuleCLI(json.loads(json.dumps(parsed)), QUIET)
    assert isinstance(cli.model.activation, torch.nn.ReLU)
    assert (*cli.model.layers, cli.model.width, cli.model.heads["a"].width) == (RECTIFY, 1, 4, 2)
    (average,) = (each for each in cli.trainer.callbacks if isinstance(each, StochasticWeightAveraging))
    assert average._device == torch.device("cpu")


OTHER_KEYS = (
    {"overfit_batches": 2, "detect_anomaly": True, "profiler": "simple", "deterministic": True, "min_epochs": 4},
    {"limit_train_batches": 0.5, "limit_val_batches": 2, "check_val_every_n_epoch": 2, "num_sanity_val_steps": 0}
    | {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}
    | {"log_every_n_steps": 2, "inference_mode": False, "use_distributed_sampler": False, "min_steps": 8},
    {"max_epochs": -1, "max_steps": 7, "val_check_interval": 2, "reload_dataloaders_every_n_epochs": 1},
)


@pytest.mark.parametrize("keys", OTHER_KEYS, ids=["first", "second", "third"])
def test_other_keys_of_the_trainer_keep_their_effect(make_spec, tmp_path, keys):
    logged = compare_with_lightning(make_spec, noise({"class_path": "optimizers.Logged"}, **keys), tmp_path)
    assert 1 < len(logged["loss_step"]) < 30


def test_the_guide_has_each_key_of_the_trainer():
    text = (ROOT / "infra/docs/guides/lightning.md").read_text()
    section = text.partition("## Keys of the trainer")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", section))
    keys = {*inspect.signature(Trainer.__init__).parameters} - {"self"}
    assert not keys - named, "decide what Paceline does with it"


SECTIONS = {
    "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.02}},
    "lr_scheduler": {
        "class_path": "lightning.pytorch.cli.ReduceLROnPlateau",
        "init_args": {"monitor": "loss_epoch", "patience": 0, "threshold": 0.9},
    },
}


def test_optimizer_and_schedule_of_the_file_train_as_with_lightning(make_spec, tmp_path):
    settings = noise({"class_path": "optimizers.Regression"}, limit_val_batches=0, max_epochs=5) | SECTIONS
    settings["trainer"]["callbacks"] = [{"class_path": "lightning.pytorch.callbacks.LearningRateMonitor"}]
    logged = compare_with_lightning(make_spec, settings, tmp_path)
    assert len(set(logged["lr-AdamW"])) > 1


def test_a_command_line_of_its_own_links_arguments(make_spec, tmp_path):
    settings = noise({"class_path": "optimizers.Regression"}, limit_val_batches=0) | SECTIONS
    settings["data"]["init_args"] = {"width": 5}
    request = Request(
        task="parse", code=str(PACKAGE.parent / "shapes"), settings=settings, cli="optimizers.LinkedCLI",
        variants=((), ("data.init_args.width=6", "note=x", "stop_early.patience=0")),
    )  # fmt: skip
    first, other = (one["settings"] for one in _do(request)["variants"])
    assert first["cli"] == {"class_path": "optimizers.LinkedCLI"}
    assert (first["model"]["init_args"]["width"], first["stop_early"]["patience"]) == (5, 50)
    assert (other["model"]["init_args"]["width"], other["stop_early"]["patience"], other["note"]) == (6, 0, "x")
    (again,) = _do(Request(task="parse", settings=other, variants=(("data.init_args.width=7",),)))["variants"]
    assert again["settings"]["model"]["init_args"]["width"] == 7
    assert again["given"]["cli"] == other["cli"]
    spec = make_spec(settings=again["settings"], baseline="none")
    result = train(spec)
    assert torch.load(result.checkpoint, weights_only=True)["state_dict"]["layers.0.weight"].shape == (8, 7)
    assert "EarlyStopping" in str(torch.load(result.checkpoint, weights_only=True)["callbacks"].keys())


def test_callbacks_of_a_command_line_of_its_own_are_those_of_the_trainer(monkeypatch):
    import optimizers

    class Counted(Timer):
        """A callback of this script alone."""

    def init(self, *args, **settings):
        LightningCLI.__init__(self, *args, trainer_defaults={"callbacks": [Counted(), RichProgressBar()]}, **settings)

    monkeypatch.setattr(optimizers.LinkedCLI, "__init__", init)
    settings = noise({"class_path": "optimizers.Regression"}) | SECTIONS
    settings["cli"] = {"class_path": "optimizers.LinkedCLI"}
    added = Timer()
    callbacks = ModuleCLI(settings, {"callbacks": [added], "enable_progress_bar": False}).trainer.callbacks
    assert added in callbacks
    assert [type(each) for each in callbacks if isinstance(each, Counted | ProgressBar)] == [Counted]


def test_hooks_of_a_command_line_of_its_own_are_called_as_in_its_script(make_spec, monkeypatch):
    import optimizers

    calls = []

    class Hooked(LightningCLI):
        def before_fit(self):
            torch.nn.init.constant_(self.model.layers[0].weight, 0.5)
            seed = self.config[self.subcommand].seed_everything
            names = (type(self.datamodule).__name__, {*vars(self.config.fit)} - {"config"}, self.config.fit.ckpt_path)
            calls.append((seed, names, self.config_init.fit.model, self.trainer.global_step))

        def after_fit(self):
            calls.append(self.trainer.global_step)
            raise ValueError("no best checkpoint")

    torch.set_num_threads(1)
    monkeypatch.setattr(sys, "argv", sys.argv[:1])
    monkeypatch.setattr(optimizers, "LinkedCLI", Hooked)
    settings = noise({"class_path": "optimizers.Regression"}, limit_val_batches=0) | SECTIONS
    trainer = settings["trainer"] | QUIET
    with pytest.raises(ValueError, match="no best checkpoint"):
        Hooked(args={"subcommand": "fit", "fit": settings | {"trainer": trainer}}, save_config_callback=None)
    (seed, data, model, first), last = plain = calls.copy()
    calls.clear()
    result = train(make_spec(settings=settings | {"cli": {"class_path": "optimizers.LinkedCLI"}}, max_seconds=1))
    assert result.probe is not None
    assert [call if isinstance(call, int) else (*call[:2], call[3]) for call in calls] == [(seed, data, first), last]
    assert len(plain) == 2
    trained = torch.load(result.checkpoint, weights_only=True)["state_dict"]
    assert all(torch.equal(trained[name], weights) for name, weights in model.state_dict().items())
    assert [note for note in result.notes if "after_fit" in note and "no best checkpoint" in note]


def test_a_command_line_of_its_own_that_replaces_the_fit_is_refused(monkeypatch):
    import optimizers

    monkeypatch.setattr(optimizers.LinkedCLI, "fit", lambda self, model, **options: None, raising=False)
    settings = noise({"class_path": "optimizers.Optimized"})
    with refused("cli", "cli=optimizers.LinkedCLI") as refusal:
        _do(Request(task="parse", settings=settings, cli="optimizers.LinkedCLI", variants=((),)))
    assert "before_fit" in refusal.value.hint


def test_classes_in_the_code_of_a_script_are_named_and_linked():
    settings = {"data": {"width": 6}, "trainer": {"max_epochs": 1}}
    names = ("model.class_path=optimizers.Optimized", "data.class_path=optimizers.Halves")
    variants = (names, (*names, "data.width=5", "model.form=dict"))
    with_cli = settings | {"cli": "optimizers.InCode"}  # as a file may name it
    parsed = _do(Request(task="parse", settings=with_cli, variants=variants))["variants"]
    first, other = (one["settings"] for one in parsed)
    assert first["model"] == {"class_path": "optimizers.Optimized", "init_args": {"form": "optimizer", "width": 6}}
    assert other["model"]["init_args"] == {"form": "dict", "width": 5}
    assert other["data"]["init_args"]["width"] == 5
    with refused("data.class_path", "data.class_path"):
        _do(Request(task="parse", settings=settings, variants=(names[:1],)))


def test_a_file_is_read_as_lightning_reads_it(tmp_path, monkeypatch):
    import optimizers
    from jsonargparse.typing import Path_fr

    class Named(optimizers.Optimized):
        def __init__(self, name: str, rate: float, number: int, table: Path_fr, more: dict | None = None):
            super().__init__()

    monkeypatch.setattr(optimizers, "Optimized", Named)
    monkeypatch.setattr(sys, "argv", sys.argv[:1])
    (tmp_path / "near").mkdir()
    file, model = tmp_path / "near" / "config.yaml", tmp_path / "near" / "model.yaml"
    (tmp_path / "near" / "table.txt").touch()
    arguments = (
        "{name: '1e5', rate: 1e-3, number: 3, table: table.txt, more: {a: '1e5', b: 1e5, c: 'on', d: 2026-01-02}}"
    )
    model.write_text(f"{{class_path: optimizers.Optimized, init_args: {arguments}}}")
    file.write_text("{model: model.yaml, trainer: {max_epochs: 3}}")
    monkeypatch.chdir(tmp_path)
    for content in (file.read_text(), f"model: {model.read_text()}"):
        file.write_text(content)
        plain = LightningCLI(args=["--config", "near/config.yaml"], run=False, save_config_callback=None).config
        for given in (["model.init_args.number=4"], []):
            settings, named = read(file, given)
            expected = plain.model.init_args.as_dict() | {"table": str(tmp_path / "near" / "table.txt")}
            if given:
                expected["number"] = 4
            assert settings["model"]["init_args"] == named["model"]["init_args"] == expected
            (again,) = _do(Request(task="parse", settings=settings, variants=((),)))["variants"]
            assert again["settings"] == settings


def test_paths_at_any_depth_start_from_the_folder_of_the_file(tmp_path, monkeypatch):
    import optimizers
    from jsonargparse.typing import Path_fr

    class Named(optimizers.Optimized):
        def __init__(self, files: list[Path_fr], named: dict[str, Path_fr], nested: dict[str, list[Path_fr]]):
            super().__init__()

    class Reader(Callback):
        def __init__(self, table: Path_fr, tables: tuple[Path_fr, ...] = ()):
            super().__init__()

    monkeypatch.setattr(optimizers, "Optimized", Named)
    monkeypatch.setattr(optimizers, "Reader", Reader, raising=False)
    file, table = tmp_path / "near" / "config.yaml", tmp_path / "near" / "t.txt"
    file.parent.mkdir()
    table.touch()
    (tmp_path / "here.txt").touch()
    arguments = f"{{files: [t.txt, {tmp_path}/here.txt], named: {{a: t.txt}}, nested: {{a: [t.txt]}}}}"
    reader = "{class_path: optimizers.Reader, init_args: {table: t.txt, tables: [t.txt]}}"
    file.write_text(
        f"{{model: {{class_path: optimizers.Optimized, init_args: {arguments}}}, trainer: {{callbacks: [{reader}]}}}}"
    )
    monkeypatch.chdir(tmp_path)
    for settings in read(file, []):
        at = str(table)
        expected = {"files": [at, str(tmp_path / "here.txt")], "named": {"a": at}, "nested": {"a": [at]}}
        assert settings["model"]["init_args"] == expected
        assert settings["trainer"]["callbacks"][0]["init_args"] == {"table": at, "tables": [at]}
        _do(Request(task="parse", settings=settings, variants=((),)))


def read(file, overrides):
    """All settings, and the named ones, of a file."""
    (one,) = _do(Request(task="parse", file=str(file), variants=(tuple(overrides),)))["variants"]
    return one["settings"], one["given"]


@pytest.mark.parametrize("path", ["optimizers.NoCLI", "absent.CLI", "optimizers.Logged", "CLI"])
def test_a_command_line_that_is_none_is_refused(path):
    with refused("cli", f"cli={path}"):
        ModuleCLI([], own=path)


@pytest.mark.skipif(not HAS_TIMM, reason="timm is not installed, which needs a torchvision of this torch")
def test_a_network_of_timm_trains_in_its_module_as_with_lightning(make_spec, tmp_path):
    settings = noise({"class_path": "of_timm.Classifier"}, limit_val_batches=0, max_epochs=1)
    settings["data"] = {"class_path": "more_shapes.Pictures", "init_args": {"size": 32, "num_samples": 32}}
    compare_with_lightning(make_spec, settings, tmp_path)


@pytest.mark.slow
def test_an_arm_whose_graph_depends_on_the_data_is_left_out_with_the_reason(make_spec):
    settings = noise({"class_path": "optimizers.Branching"}, limit_val_batches=0)
    spec = make_spec(settings=settings, max_seconds=1)
    spec = spec.model_copy(update={"measurement": Measurement(arms={}, of_module="moves", can_leave_out=True)})
    result = measure_module(spec, Stopwatch("startup"))
    (left_out,) = result.probe.left_out.items()
    assert left_out[0] == "execution.compile=step"
    assert "Data-dependent branching" in left_out[1]
    assert result.probe.candidate.precision == "bf16-mixed"


def test_fp16_is_left_out_for_a_module_that_scales_its_loss_itself(pictures, make_spec, monkeypatch):
    from paceline.tasks.train.lightning import fit

    pictures["model"]["class_path"] = "faulty.Scaled"
    plain = train(make_spec(settings=pictures, baseline="none"))
    assert None not in plain.losses
    # As an instance: Lightning would take bf16 where it is called "cpu". No step is made in fp16.
    options = fit.options_of
    monkeypatch.setattr(fit, "options_of", lambda spec: options(spec) | {"accelerator": CPUAccelerator()})
    spec = make_spec("16-mixed", 1, settings=pictures, execution={"precision": "auto"}, baseline="none")
    result = train(spec)
    choice = result.plan.reasons["precision"]
    assert result.plan.precision == choice.value == "32-true"
    assert "does not run in 16-mixed: RunError: Scaled.scaler scales the loss" in choice.reason
    assert result.losses == plain.losses
    with pytest.raises(RunError, match=r"Scaled\.scaler scales the loss") as refusal:
        train(spec.model_copy(update={"may_search": False}))
    assert "execution.precision=32-true" in refusal.value.hint
