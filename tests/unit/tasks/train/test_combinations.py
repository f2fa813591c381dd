"""Legal combinations of Lightning's features: the values of Lightning alone, also after a resume inside an epoch."""

import copy
from pathlib import Path

import pytest
import torch

from paceline.tasks.train.lightning.cli import ModuleCLI
from paceline.tasks.train.rank.checkpoint import newest_valid_checkpoint
from tests.support.own_lightning import QUIET, train

pytest.importorskip("jsonargparse", reason="LightningCLI needs it; infra/install brings it")
pytestmark = [pytest.mark.usefixtures("own_packages"), pytest.mark.filterwarnings("ignore")]  # Lightning's advice


def callback(name, **arguments):
    """A callback of Lightning in a file."""
    return {"callbacks": [{"class_path": f"lightning.pytorch.callbacks.{name}", "init_args": arguments}]}


DATA = {
    **{name: {"loader": name} for name in ("dict", "list", "longest", "collate", "batch sampler", "epoch sampler")},
    **{name: {"loader": name} for name in ("weighted", "samples", "generator", "other class")},
    "collate in workers": {"loader": "collate", "num_workers": 2},
    **{f"noise of {name}": {"noise": name} for name in ("torch", "numpy", "python")},
    **{f"noise of {name} in workers": {"noise": name, "num_workers": 2} for name in ("torch", "numpy", "python")},
}
MODEL = {
    "adam": {"optimizer": "adam"},
    "lbfgs": {"optimizer": "lbfgs"},
    **{name: {"schedule": name} for name in ("one cycle", "plateau", "plateau of steps", "by hand")},
}
TRAINER = {
    "accumulation": {"accumulate_grad_batches": 4, "gradient_clip_val": 0.5},
    "scheduled accumulation": callback("GradientAccumulationScheduler", scheduling={0: 1, 1: 3}),
    "early stop": callback("EarlyStopping", monitor="val_mean", patience=0, min_delta=10.0),
    "average": callback("StochasticWeightAveraging", swa_lrs=0.01, swa_epoch_start=1) | {"max_epochs": 4},
    "moving average": callback("EMAWeightAveraging"),
    "found rate": callback("LearningRateFinder", num_training_steps=6),
    "overfit": {"overfit_batches": 3},
    "limits": {"limit_train_batches": 0.55, "limit_val_batches": 1},
    "validation across epochs": {"val_check_interval": 7, "check_val_every_n_epoch": None},
    "validation in epochs": {"val_check_interval": 0.25},
    "rare validation": {"check_val_every_n_epoch": 2},
    "sanity": {"num_sanity_val_steps": -1},
    "steps": {"max_steps": 17, "max_epochs": -1},
    "steps and accumulation": {"max_steps": 17, "accumulate_grad_batches": 3, "max_epochs": None},
}
CASES = {
    **{name: {"data": arguments} for name, arguments in DATA.items()},
    **{name: {"model": arguments} for name, arguments in MODEL.items()},
    **{name: {"trainer": arguments} for name, arguments in TRAINER.items()},
    "stream": {"data": {"loader": "stream"}, "trainer": {"limit_train_batches": 9}},
    "stream of workers": {"data": {"loader": "stream", "num_workers": 2}, "trainer": {"limit_train_batches": 9}},
    "one cycle and accumulation": {"model": {"schedule": "one cycle"}, "trainer": {"accumulate_grad_batches": 3}},
    "hooks": {"class": "Hooked"},
}
FAILS_AT = 17  # batch; inside the second epoch of most
ENDS_ONLY = {"dict", "list", "longest"}
"""Their checkpoints are saved at the ends of epochs, of which none has come by then."""
TOO_SHORT = {"overfit", "limits"}
QUICK = {
    *("batch sampler", "noise of numpy in workers", "one cycle", "scheduled accumulation", "average"),
    *("validation across epochs", "stream", "hooks"),
}
"""Resumed in each run of the tests."""


def ways():
    """Names and ways of all comparisons; LBFGS calls a step more often than once for each batch."""
    for name in CASES:
        for way in ("plain", "probe", "resume"):
            if way != "resume" or name not in ENDS_ONLY | TOO_SHORT | {"lbfgs"}:
                is_quick = way == "resume" and name in QUICK
                yield pytest.param(name, way, marks=[] if is_quick else pytest.mark.slow)


def settings_of(case):
    """The settings of a training."""
    return {
        "seed_everything": 5,
        "model": {"class_path": f"combined.{case.get('class', 'Net')}", "init_args": case.get("model", {})},
        "data": {"class_path": "combined.Data", "init_args": case.get("data", {})},
        "trainer": {"max_epochs": 3, "accelerator": "cpu", "devices": 1} | case.get("trainer", {}),
    }


def resume(settings, make_spec, monkeypatch):
    """The result of a training that fails, and resumes from its newest checkpoint."""
    import combined

    step, calls = combined.Net.training_step, []

    def fail(self, *arguments):
        calls.append(arguments)
        if len(calls) == FAILS_AT:
            raise ConnectionError("a rank is lost")
        return step(self, *arguments)

    spec = make_spec(settings=settings, baseline="none", execution={"checkpoint_steps": 7})
    monkeypatch.setattr(combined.Net, "training_step", fail)
    with pytest.raises(ConnectionError):
        train(spec)
    monkeypatch.setattr(combined.Net, "training_step", step)
    checkpoint = newest_valid_checkpoint(Path(spec.checkpoint_directory))
    combined.losses.clear()
    again = make_spec(settings=settings, baseline="none", attempt=1)
    return train(again.model_copy(update={"resume_from": str(checkpoint)}))


@pytest.mark.parametrize(("name", "way"), [*ways()])
def test_a_combination_has_the_values_of_lightning(name, way, make_spec, monkeypatch, tmp_path):
    import combined

    torch.set_num_threads(1)
    combined.losses.clear()
    settings = settings_of(CASES[name])
    cli = ModuleCLI(copy.deepcopy(settings), QUIET | {"default_root_dir": str(tmp_path / "alone")})
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    losses = combined.losses.copy()
    metrics = {name: float(value) for name, value in cli.trainer.callback_metrics.items()}
    combined.losses.clear()
    if way == "resume":
        result = resume(settings, make_spec, monkeypatch)
        assert 0 < len(combined.losses) < len(losses)
        losses = losses[-len(combined.losses) :]
    else:
        result = train(make_spec(settings=settings, baseline="probe" if way == "probe" else "none", max_seconds=1))
        assert (result.probe is not None) is (way == "probe")
    assert combined.losses[-len(losses) :] == losses
    assert result.metrics == metrics
    assert result.num_steps == cli.trainer.global_step
    if name != "average":  # which Lightning gives to the module after the last checkpoint
        trained = torch.load(result.checkpoint, weights_only=True)["state_dict"]
        assert all(torch.equal(trained[name], weights) for name, weights in cli.model.state_dict().items())
