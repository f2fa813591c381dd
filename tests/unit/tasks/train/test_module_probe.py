"""The probe of a user's module in a rank: its arms, and a training that it does not change."""

import copy
import itertools
import pickle
import random
import time
import weakref
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, IterableDataset

from paceline.tasks.errors import InputError
from paceline.tasks.records.measurement import AutotuneResult
from paceline.tasks.speedup.limit_share import limit_share
from paceline.tasks.speedup.verdict import speedup_result
from paceline.tasks.train.autotune import search
from paceline.tasks.train.autotune.choice import winning_roles
from paceline.tasks.train.launch.layout import SEARCH_FILE
from paceline.tasks.train.lightning.cli import ModuleCLI
from paceline.tasks.train.lightning.probe import DEFAULT_EPOCHS, ModuleProbe
from paceline.tasks.train.step.compile import CompileParts
from tests.support.own_lightning import QUIET, train
from tests.support.two_ranks import SHORT_PATIENCE, ended, said_by, start_two, train_in_two_processes

pytest.importorskip("jsonargparse", reason="LightningCLI needs it; infra/install brings it")
pytestmark = [pytest.mark.usefixtures("own_packages"), pytest.mark.filterwarnings("ignore")]  # Lightning's advice

FULL = 32


def test_the_probe_changes_nothing_of_the_training(settings, make_spec, monkeypatch):
    from prose.corpus import Corpus
    from prose.gpt import GPT

    heard = []

    class Hearing(Callback):
        def on_exception(self, trainer, pl_module, exception):
            heard.append(exception)

    shared = Hearing()  # with the training, too
    monkeypatch.setattr(Corpus, "on_exception", lambda self, error: heard.append(error))
    monkeypatch.setattr(GPT, "configure_callbacks", lambda self: shared, raising=False)
    cli = ModuleCLI(settings, QUIET)
    torch.set_num_threads(1)
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    plain = {name: weights.clone() for name, weights in cli.model.state_dict().items()}
    drawn = random.random(), np.random.random(), torch.rand(1)
    result = train(make_spec())
    trained = torch.load(result.checkpoint, weights_only=True)["state_dict"]
    assert all(torch.equal(trained[name], weights) for name, weights in plain.items())
    assert (random.random(), np.random.random(), torch.rand(1)) == drawn
    assert result.probe.baseline == result.probe.candidate
    assert result.time_budget["probe"] > 0
    assert speedup_result(result.probe, result).cause == "identical arms"
    assert heard == [], "arms end by an error of their own"
    shared.on_exception(None, None, "later")
    assert heard == ["later"]


def test_the_data_of_the_arms_are_gone_when_the_training_starts(settings, make_spec, monkeypatch):
    from prose.corpus import Corpus
    from prose.gpt import GPT

    set_up, alive = [], []
    setup = Corpus.setup

    def note(self, stage):
        set_up.append(weakref.ref(self))
        setup(self, stage)

    monkeypatch.setattr(Corpus, "setup", note)
    monkeypatch.setattr(GPT, "on_train_start", lambda _: alive.append(sum(each() is not None for each in set_up)))
    assert train(make_spec()).probe is not None
    assert len(set_up) == 2
    assert set(alive) == {1}


def test_ranks_find_their_shares_by_the_variables_of_a_launcher(make_spec):
    """After the trainers of the arms too; in the training each rank reads half."""
    settings = {
        "model": {"class_path": "more_shapes.Line"},
        "data": {"class_path": "more_shapes.Shares"},
        "trainer": {"max_epochs": 1, "limit_train_batches": 100},
    }
    result = train_in_two_processes(make_spec, settings=settings)
    assert result.probe is not None
    assert result.num_batches == 8


def test_a_schedule_over_all_steps_is_probed_where_max_steps_alone_ends_the_training(settings, make_spec, monkeypatch):
    from more_shapes import Perceptron

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        total = self.trainer.estimated_stepping_batches
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total)]

    monkeypatch.setattr(Perceptron, "configure_optimizers", configure_optimizers)
    settings |= {"model": {"class_path": "more_shapes.Perceptron"}, "data": {"class_path": "more_shapes.Pictures"}}
    settings["trainer"] = {"accelerator": "cpu", "max_epochs": -1, "max_steps": 8}
    result = train(make_spec(settings=settings, max_seconds=1))
    assert result.no_probe is None
    assert result.probe is not None


def test_progress_bars_and_the_logger_of_a_script_do_not_end_the_training(settings, make_spec):
    bars = [{"class_path": f"lightning.pytorch.callbacks.{name}"} for name in ("TQDMProgressBar", "DeviceStatsMonitor")]
    settings["model"] = {"class_path": "more_shapes.Diarist"}
    settings["data"] = {"class_path": "shapes.Noise"}
    settings["trainer"] |= {"callbacks": bars}
    spec = make_spec()
    result = train(spec)
    assert result.no_probe is None
    assert result.probe is not None
    (notes,) = Path(spec.directory).rglob("notes.txt")
    assert notes.read_text() == "epoch 0\n"


AUTO = {"precision": "auto"}


@pytest.mark.parametrize("chosen", ["32-true", pytest.param("bf16-mixed", marks=pytest.mark.slow)])
def test_auto_takes_the_precision_that_was_timed_as_faster(make_spec, monkeypatch, chosen):
    monkeypatch.setattr(search, "LAYER_SECONDS", 30.0)  # on a busy machine too
    change_step(monkeypatch, lambda batch: wait_if(torch.is_autocast_enabled("cpu") == (chosen == "32-true")))
    spec = make_spec("bf16-mixed", execution=AUTO, baseline="none")
    result = train(spec)
    choice = result.plan.reasons["precision"]
    assert result.plan.precision == choice.value == chosen
    assert choice.reason.startswith("timed before training" if chosen == "32-true" else "the rule; timed")
    assert "the speed of bf16-mixed" in choice.reason
    assert result.search.num_steps == len(result.losses) == 9
    assert result.time_budget["search"] > 0
    recorded = AutotuneResult.model_validate_json((Path(spec.directory) / SEARCH_FILE).read_text())
    assert recorded == result.search
    again = train(make_spec("bf16-mixed", 1, execution=AUTO, baseline="none").model_copy(update={"search": recorded}))
    assert (again.plan, again.losses) == (result.plan, result.losses)
    assert not list(Path(spec.home).glob(f"run-1/**/{SEARCH_FILE}")), "it is not timed again"


def test_auto_leaves_a_precision_in_which_the_module_does_not_run(make_spec, monkeypatch):
    change_step(monkeypatch, lambda batch: torch.is_autocast_enabled("cpu"))
    plain = train(make_spec(baseline="none"))
    result = train(make_spec("bf16-mixed", 1, execution=AUTO, baseline="none"))
    assert result.plan.precision == "32-true"
    assert "does not run in bf16-mixed: NotImplementedError: no such kernel" in result.plan.reasons["precision"].reason
    assert result.losses == plain.losses


def test_a_module_that_does_not_run_at_all_says_so_in_its_training(make_spec, monkeypatch):
    change_step(monkeypatch, lambda batch: True)
    with pytest.raises(NotImplementedError, match="no such kernel"):
        train(make_spec("bf16-mixed", execution=AUTO))


@pytest.mark.parametrize(
    ("trainer", "length", "steps"),
    [
        ({"max_epochs": 3}, 10, 30),
        ({"max_epochs": 3, "accumulate_grad_batches": 5}, 10, 6),
        ({"max_epochs": 3, "limit_train_batches": 4}, 10, 12),
        ({"max_epochs": 3, "limit_train_batches": 0.5}, 10, 15),
        ({"max_epochs": 3, "max_steps": 7}, 10, 7),
        ({"max_steps": 7}, None, 7),
        ({"max_epochs": 1000, "max_time": "00:00:01:00"}, 10, 0),
        ({"max_time": "00:00:01:00"}, 10, 0),
        ({"max_epochs": -1}, 10, 0),
        ({}, 10, 10 * DEFAULT_EPOCHS),
    ],
)
def test_the_planned_steps_follow_from_the_trainer(make_spec, settings, trainer, length, steps):
    spec = make_spec(settings=settings | {"trainer": trainer})
    probe = ModuleProbe(spec, torch.device("cpu"), {}, lambda wrap, is_group: {})
    probe._length = length
    assert probe.planned_steps() == steps


def test_a_copy_of_a_compiled_module_has_a_forward_of_its_own(settings):
    module = ModuleCLI(settings, QUIET).model
    CompileParts().on_fit_start(None, module)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert copied.forward.__self__ is copied
    assert module.state_dict().keys() == copied.state_dict().keys()


def test_an_arm_that_fails_later_is_left_out_of_the_search(make_spec, monkeypatch):
    steps = itertools.count()
    change_step(monkeypatch, lambda batch: not torch.is_autocast_enabled("cpu") and next(steps) > 1)
    result = train(make_spec("bf16-mixed", execution=AUTO, baseline="none"))
    assert result.plan.precision == "bf16-mixed"
    (reason,) = result.search.failed.values()
    assert "no such kernel" in reason


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [9, 10**9])
def test_auto_compiles_where_that_is_repaid(make_spec, monkeypatch, num_steps):
    monkeypatch.setattr(search, "LAYER_SECONDS", 2 * search.COLD_COMPILE_SECONDS)
    monkeypatch.setattr(ModuleProbe, "planned_steps", lambda probe: num_steps)
    result = train(make_spec(execution={"compile": "auto"}, baseline="none"))
    (probe,) = result.search.probes
    assert {probe.candidate.compile, probe.baseline.compile} == {"off", "step"}
    choice = result.plan.reasons["compile"]
    assert result.plan.compile == choice.value
    assert result.search.compile_seconds > 0
    assert f"compiled in {result.search.compile_seconds:.0f} s" in choice.reason
    is_open = num_steps > 9 and not result.search.validity.contaminated  # other programs disturb one arm more
    assert result.plan.compile == ("step" if is_open and winning_roles(probe, 0, num_steps) else "off")
    assert (result.compile is not None) == (result.plan.compile == "step")
    again = make_spec(attempt=1, execution={"compile": "auto"}, baseline="none")
    assert train(again.model_copy(update={"search": result.search})).plan == result.plan


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GPT", "GAN", "Configured"])
def test_a_compiled_module_trains_as_an_eager_one(make_spec, settings, name):
    if name != "GPT":
        trainer = {"max_epochs": 2, "accelerator": "cpu", "devices": 1}
        own = {"model": {"class_path": f"shapes.{name}"}, "data": {"class_path": "shapes.Noise"}}
        settings = {"seed_everything": 5, "trainer": trainer, **own}
    eager = train(make_spec("64-true", settings=settings, baseline="none"))  # Adam makes steps of rounding errors
    result = train(make_spec("64-true", 1, settings=settings, execution={"precision": "64-true", "compile": "step"}))
    weights, plain = (torch.load(each.checkpoint, weights_only=True)["state_dict"] for each in (result, eager))
    assert weights.keys() == plain.keys()
    assert max(float((weights[name] - plain[name]).abs().max()) for name in plain) < 1e-6
    assert result.compile.num_graphs > 0
    assert result.probe.candidate.compile == "step"
    assert result.cost.training_flops > 0


def wait_if(condition):
    time.sleep(0.2 if condition else 0)  # longer than a step in emulated bf16


def test_means_of_an_epoch_over_two_ranks_end(make_spec):
    result = train_in_two_processes(make_spec, settings=of_shapes("Autoencoder"), baseline="none")
    assert result.num_epochs == 2
    assert 0 < result.num_batches % 50 < 50
    assert "train_loss_epoch" in result.metrics


def of_shapes(name):
    return {
        "seed_everything": 5,
        "model": {"class_path": f"shapes.{name}"},
        "data": {"class_path": "shapes.Noise"},
        "trainer": {"max_epochs": 2},  # an epoch ends between two of the 50th steps, at which Lightning logs
    }


@pytest.mark.slow
def test_collectives_of_the_module_itself_wait_for_nobody_in_an_arm_of_one_device(make_spec):
    plain = train_in_two_processes(make_spec, settings=of_shapes("Gathered"), baseline="none")
    result = train_in_two_processes(make_spec, attempt=1, settings=of_shapes("Gathered"), diagnose=True)
    assert result.no_probe is None
    assert (result.probe.baseline.num_devices, result.probe.candidate.num_devices) == (1, 2)
    assert "no_sync" in result.probe.others
    assert result.losses == plain.losses


@pytest.mark.slow
def test_what_one_rank_alone_cannot_run_is_named(make_spec):
    specs, processes = start_two(make_spec, SHORT_PATIENCE, settings=of_shapes("Halfway"))
    with ended(processes):
        assert processes[1].wait(100) == 1
        said = said_by(specs[1])
        assert "RunError: rank 1 alone cannot run 2 devices" in said
        assert "FileNotFoundError: sample 7 of this rank is not there" in said
        assert processes[0].wait(20) != 0, "its peer has ended"


@pytest.mark.slow
def test_two_ranks_are_compared_with_one_and_train_as_without_a_probe(make_spec):
    plain = train_in_two_processes(make_spec, baseline="none")
    result = train_in_two_processes(make_spec, attempt=1, diagnose=True)
    assert result.losses == plain.losses
    probe = result.probe
    assert (probe.baseline.num_devices, probe.candidate.num_devices) == (1, 2)
    assert probe.others.keys() == {"single", "all_cores", "synthetic_input", "no_update", "no_sync", "half_batch"}
    assert probe.others["all_cores"] == probe.others["single"].model_copy(update={"num_threads": 2})
    assert probe.left_out == {}
    assert probe.samples_per_step["candidate"] == 2 * probe.samples_per_step["baseline"] == 2 * FULL
    assert probe.samples_per_step["no_sync"] == probe.samples_per_step["candidate"]
    assert all(len(block.rank_seconds) == 2 for block in probe.rounds[0] if block.arm == "no_sync")
    assert speedup_result(probe, result).efficiency > 0


@pytest.mark.slow
def test_the_arm_with_all_cores_computes_with_the_threads_of_all_ranks(make_spec, tmp_path):
    path = tmp_path / "threads.txt"
    settings = {
        "seed_everything": 5,
        "model": {"class_path": "measured.Threads", "init_args": {"path": str(path)}},
        "data": {"class_path": "more_shapes.Pictures"},
        "trainer": {"max_epochs": 1},
    }
    result = train_in_two_processes(make_spec, settings=settings)
    assert "all_cores" in result.probe.others
    assert {*path.read_text().split()} == {"1", "2"}


@pytest.mark.slow
def test_two_ranks_take_the_same_precision_and_train_compiled(make_spec):
    plain = train_in_two_processes(make_spec, baseline="none")
    execution = {"precision": "auto", "compile": "step"}
    result = train_in_two_processes(make_spec, attempt=1, precision="bf16-mixed", execution=execution)
    assert result.search.probes or result.search.slower
    assert result.plan.precision in ("32-true", "bf16-mixed")
    assert result.compile.num_graphs > 0
    assert result.losses == pytest.approx(plain.losses, rel=0.05)
    assert {result.probe.candidate.compile, result.probe.others["single"].compile} == {"step"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GAN", "Autoencoder", "Configured"])
def test_modules_of_other_shapes_are_probed_and_train_as_by_lightning_alone(name, make_spec):
    trainer = {"max_epochs": 2, "accelerator": "cpu", "devices": 1}
    settings = {
        "seed_everything": 5,
        "model": {"class_path": f"shapes.{name}"},
        "data": {"class_path": "shapes.Noise"},
        "trainer": trainer,
    }
    torch.set_num_threads(1)
    cli = ModuleCLI(settings, QUIET)
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    result = train(make_spec(settings=settings, diagnose=True))
    trained = torch.load(result.checkpoint, weights_only=True)["state_dict"]
    assert all(torch.equal(trained[key], weights) for key, weights in cli.model.state_dict().items())
    assert ("no_update" in result.probe.left_out) == (name == "GAN")
    assert {"synthetic_input", "half_batch"} <= result.probe.others.keys()
    assert result.probe.diverged == ()
    assert result.cost.training_flops > 0


@pytest.mark.slow
def test_arms_of_a_diagnosis_share_the_step(make_spec, monkeypatch):
    from prose.gpt import GPT

    monkeypatch.setattr(GPT, "paceline", {"units": {"bytes": "bytes"}}, raising=False)
    result = train(make_spec("bf16-mixed", diagnose=True))
    probe = result.probe
    assert {*probe.others} == {"synthetic_input", "no_update", "half_batch"}
    assert probe.left_out == {}
    assert probe.samples_per_step == {role: FULL for role in probe.samples_per_step} | {"half_batch": FULL // 2}
    assert (probe.baseline.precision, probe.candidate.precision) == ("32-true", "bf16-mixed")
    speedup = speedup_result(probe, result)
    assert speedup.ratio > 0
    assert speedup.shares.keys() == {"input", "update", "overhead", "compute"}
    products = 12 * 16**2 + 16 * 256 + 2 * 64 * 16  # of each byte: the block's weights, the last layer, attention
    assert result.uncounted == ""
    assert result.cost.forward_flops == 2 * 64 * products
    assert result.cost.training_flops == pytest.approx(3 * result.cost.forward_flops, rel=0.1)
    assert limit_share(result).of_limit > 0
    assert result.units_per_second["bytes"] == pytest.approx(64 * result.samples_per_second)


def slow_sample(monkeypatch):
    from prose.corpus import Windows

    read = Windows.__getitem__
    monkeypatch.setattr(Windows, "__getitem__", lambda self, index: time.sleep(0.003) or read(self, index))


def waiting_step(monkeypatch):
    change_step(monkeypatch, lambda batch: time.sleep(0.15))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "share"), [(slow_sample, "input"), (waiting_step, "overhead")], ids=["input", "step"]
)
def test_a_planted_limit_has_the_largest_share(make_spec, monkeypatch, plant, share):
    plant(monkeypatch)
    result = train(make_spec(diagnose=True, num_blocks=12, max_seconds=8))
    speedup = speedup_result(result.probe, result)
    assert max(speedup.shares, key=lambda name: speedup.shares[name][0]) == share, speedup.diagnosis


@pytest.mark.slow
def test_an_arm_that_the_module_cannot_run_is_left_out_with_its_reason(make_spec, monkeypatch):
    change_step(monkeypatch, lambda batch: len(batch["bytes"]) == FULL // 2)
    probe = train(make_spec(diagnose=True)).probe
    assert "half_batch" not in probe.others
    assert probe.left_out == {"half_batch": "NotImplementedError: no such kernel"}


@pytest.mark.slow
def test_without_its_baseline_there_is_no_probe_but_a_training(make_spec, monkeypatch):
    change_step(monkeypatch, lambda batch: not torch.is_autocast_enabled("cpu"))
    result = train(make_spec("bf16-mixed"))
    assert result.probe is None
    assert result.no_probe.startswith("the module does not run as 1 device, 32-true")
    assert "NotImplementedError: no such kernel" in result.no_probe
    assert speedup_result(result.probe, result).verdict == f"not measured: {result.no_probe}"
    assert len(result.losses) == 9


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield {"bytes": torch.ones(64, dtype=torch.long), "next": torch.ones(64, dtype=torch.long)}


class Stuck(dict):
    def to(self, device, **how):
        raise RuntimeError("no such device")


STUCK = DataLoader(range(8), 4, collate_fn=lambda samples: Stuck(bytes=torch.ones(4, 64)))


def read_from(loader, monkeypatch):
    from prose.corpus import Corpus

    monkeypatch.setattr(Corpus, "train_dataloader", lambda self: loader)


def return_none(monkeypatch):
    from prose.gpt import GPT

    monkeypatch.setattr(GPT, "training_step", lambda self, batch, batch_idx: None)


@pytest.mark.slow
@pytest.mark.parametrize("baseline", ["probe", "none"])
@pytest.mark.parametrize(
    ("change", "fault", "hint"),
    [
        (return_none, "training_step of GPT returned None", "return the loss"),
        (partial(read_from, DataLoader(Endless(), 32)), "the training loader has no length", "trainer.max_steps"),
        (partial(read_from, STUCK), "a batch of type Stuck cannot be moved to cpu", "transfer_batch_to_device"),
    ],
    ids=["none", "endless", "stuck"],
)
def test_what_cannot_be_trained_is_refused_before_the_probe_is_measured(
    make_spec, monkeypatch, change, fault, hint, baseline
):
    change(monkeypatch)
    spec = make_spec(baseline=baseline, max_seconds=1000)
    with pytest.raises(InputError, match=fault) as refusal:
        train(spec)
    assert hint in refusal.value.hint
    assert not (Path(spec.directory) / "probe.json").exists()


def change_step(monkeypatch, is_refused):
    from prose.gpt import GPT

    step = GPT.training_step

    def training_step(self, batch, batch_idx):
        if is_refused(batch):
            raise NotImplementedError("no such kernel")
        return step(self, batch, batch_idx)

    monkeypatch.setattr(GPT, "training_step", training_step)
