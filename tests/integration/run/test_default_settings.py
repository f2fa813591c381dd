"""Own Lightning code on two ranks with Lightning's default settings: each rank ends as one of its DDP does."""

import json
import shutil

import pytest
import torch
import yaml

from tests.integration.run.test_ten_modules import PACKAGE, TURNS
from tests.support.own_lightning import values_of_run, values_of_script

pytest.importorskip("jsonargparse", reason="LightningCLI needs it; infra/install brings it")
pytestmark = pytest.mark.slow

NO_PROBE = "speedup.baseline=none"


@pytest.fixture
def code(tmp_path):
    return shutil.copytree(PACKAGE, tmp_path / "code")


def callback(name, **arguments):
    path = name if "." in name else f"lightning.pytorch.callbacks.{name}"
    return {"class_path": path, "init_args": arguments}


def pictures(*callbacks, model="measured.Measured", num_samples=1000, **trainer):
    """Settings of a module on images, with Lightning's `log_every_n_steps`."""
    return {
        "seed_everything": 7,
        "model": {"class_path": model},
        "data": {"class_path": "more_shapes.Pictures", "init_args": {"num_samples": num_samples}},
        "trainer": {"callbacks": list(callbacks), **trainer},
    }


def of_shapes(name):
    """Settings of one of the ten modules, with so many samples that Lightning logs inside an epoch."""
    settings = yaml.safe_load((PACKAGE / "configs" / f"{name}.yaml").read_text())
    return settings | {"data": settings["data"] | {"init_args": {"num_samples": 2400}}}


@pytest.fixture
def run(paceline, code, tmp_path):
    """Runs a module on two ranks; the summary and the final state of each rank."""

    def to_the_end(settings, *overrides):
        path = code / "own.yaml"
        path.write_text(yaml.safe_dump(with_final_state(settings, tmp_path / "own")))
        process = paceline("run", str(path), "--code", str(code), "--json", "execution.num_devices=2", *overrides)
        out, said = process.communicate(timeout=200)
        assert process.returncode == 0, said
        return json.loads(out.splitlines()[-1]), states_in(tmp_path / "own")

    return to_the_end


@pytest.fixture
def compare(run, code, tmp_path):
    """Runs a module with Lightning and with Paceline; the summary and the final states, which are equal."""

    def with_lightning(settings, *overrides, strategy="ddp"):
        (code / "plain.yaml").write_text(yaml.safe_dump(with_final_state(settings, tmp_path / "plain")))
        trainer = ["enable_progress_bar=false", "accelerator=cpu", "devices=2", f"strategy={strategy}"]
        logged = values_of_script(code, "plain.yaml", tmp_path, *(f"trainer.{one}" for one in trainer))
        (code / "plain.yaml").unlink()
        summary, states = run(settings, f"trainer.strategy={strategy}", *overrides)
        expected = states_in(tmp_path / "plain")
        for state, plain in zip(states, expected, strict=True):
            weights, others = state.pop("weights"), plain.pop("weights")
            assert weights.keys() == others.keys()
            assert [name for name in weights if not torch.equal(weights[name], others[name])] == []
            assert state == plain
        assert values_of_run(summary["run_id"], logged) == logged
        return summary, states

    return with_lightning


def with_final_state(settings, directory):
    trainer = settings["trainer"]
    last = callback("measured.FinalState", directory=str(directory))
    return settings | {"trainer": trainer | {"callbacks": [*trainer.get("callbacks", ()), last]}}


def states_in(directory):
    return [torch.load(directory / f"rank-{rank}.pt", weights_only=True) for rank in range(2)]


def test_an_early_stop_between_uneven_updates_is_that_of_lightning(compare):
    stop = callback("EarlyStopping", monitor="val/own", patience=2, min_delta=0.05)
    uneven = {"limit_train_batches": 0.9, "accumulate_grad_batches": 3, "gradient_clip_val": 0.5}
    settings = pictures(stop, max_epochs=40, val_check_interval=0.5, **uneven)
    _, (first, second) = compare(settings, "speedup.max_seconds=3")
    num_epochs, num_steps, num_batches = first["progress"]
    assert 1 < num_epochs < 40
    assert 3 * num_steps > num_batches, "the last update of an epoch has fewer batches"
    assert first["metrics"]["val/own"] != second["metrics"]["val/own"], "a rank may stop the other one"
    assert first["metrics"]["train/loss_epoch"] == second["metrics"]["train/loss_epoch"]


@pytest.mark.parametrize(
    "average",
    [
        callback("StochasticWeightAveraging", swa_lrs=0.05, swa_epoch_start=2, annealing_epochs=2),
        callback("EMAWeightAveraging", decay=0.9),
    ],
    ids=lambda average: average["class_path"].rpartition(".")[2],
)
def test_averaged_weights_are_those_of_lightning(compare, average):
    convolutions = pictures(average, model="more_shapes.Convolutions", num_samples=300, max_epochs=4)
    compare(convolutions, "execution.checkpoint_steps=3", NO_PROBE)


def test_a_learning_rate_that_is_searched_for_is_that_of_lightning(compare):
    finder = callback("LearningRateFinder", num_training_steps=40, min_lr=1e-5, max_lr=0.5)
    _, (first, second) = compare(pictures(finder, max_epochs=3), "speedup.max_seconds=3")
    assert first["hyperparameters"] == second["hyperparameters"]
    assert first["hyperparameters"]["lr"] != 0.01


def test_a_limit_of_time_ends_both_ranks_at_one_step(run):
    limited = pictures(max_epochs=-1, max_time={"seconds": 3})
    summary, (first, second) = run(limited, NO_PROBE)
    assert first["progress"] == second["progress"]
    assert torch.equal(first["weights"]["layers.1.weight"], second["weights"]["layers.1.weight"])
    checkpoint = torch.load(summary["train"]["checkpoint"], weights_only=True)
    assert checkpoint["global_step"] == first["progress"][1] > 0
    assert values_of_run(summary["run_id"], ["val/loss"])["val/loss"]


@pytest.mark.parametrize("name", ["gan", "autoencoder", "configured", "convolutions", "flags"])
def test_a_module_of_another_shape_ends_as_with_lightning(compare, name):
    strategy = "ddp_find_unused_parameters_true" if name in TURNS else "ddp"
    summary, _ = compare(of_shapes(name), "speedup.max_seconds=3", strategy=strategy)
    assert summary["speedup"]["verdict"]


def test_auto_ends_on_both_ranks_with_equal_weights(run):
    chosen = ("execution.precision=auto", "execution.compile=auto", "speedup.max_seconds=3")
    summary, (first, second) = run(of_shapes("convolutions"), *chosen)
    assert {"precision", "compile"} <= summary["execution"]["reasons"].keys()
    assert first["progress"] == second["progress"]
    assert all(torch.equal(weights, second["weights"][name]) for name, weights in first["weights"].items())
