"""Ten modules and more that nobody changed for Paceline, from their LightningCLI files: the values of the script."""

import json
import shutil
import signal
from pathlib import Path

import pytest

from tests.support.own_lightning import ranks_of, values_of_run, values_of_script, wait_for_checkpoint

pytest.importorskip("jsonargparse", reason="LightningCLI needs it; infra/install brings it")

PACKAGE = Path(__file__).parents[2] / "packages" / "shapes"
NAMES = sorted(path.stem for path in (PACKAGE / "configs").glob("*.yaml"))
TURNS = {"gan"}
"""Modules in whose steps some weights have no gradient."""
NO_PROBE = "speedup.baseline=none"


@pytest.fixture
def code(tmp_path):
    return Path(shutil.copytree(PACKAGE, tmp_path / "code"))


def options(name, num_ranks):
    """Overrides of the trainer, in the words of LightningCLI."""
    if num_ranks == 1:
        return []
    return [f"trainer.strategy=ddp{'_find_unused_parameters_true' if name in TURNS else ''}"]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_the_script(paceline, tmp_path, code, name, num_ranks):
    trainer = ["log_every_n_steps=1", "enable_progress_bar=false", "accelerator=cpu", f"devices={num_ranks}"]
    overrides = [*(f"trainer.{one}" for one in trainer), *options(name, num_ranks)]
    plain = values_of_script(code, f"configs/{name}.yaml", tmp_path, *overrides)
    assert plain, "the script logs something"
    settings = [f"execution.num_devices={num_ranks}", "trainer.log_every_n_steps=1", "speedup.max_seconds=3"]
    command = ["run", str(code / "configs" / f"{name}.yaml"), "--code", str(code), "--json", *settings]
    process = paceline(*command, *options(name, num_ranks))
    out, said = process.communicate(timeout=200)
    assert process.returncode == 0, said
    summary = json.loads(out.splitlines()[-1])
    assert values_of_run(summary["run_id"], plain) == plain
    assert summary["train"]["samples_per_second"] > 0
    assert summary["speedup"]["verdict"]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_test_loop_logs_the_values_of_the_script(paceline, tmp_path, code, num_ranks):
    config, ranks = code / "configs" / "perceptron.yaml", [f"execution.num_devices={num_ranks}", NO_PROBE]
    process = paceline("run", str(config), "--code", str(code), "--json", *ranks, *options("perceptron", num_ranks))
    out, said = process.communicate(timeout=200)
    assert process.returncode == 0, said
    summary = json.loads(out.splitlines()[-1])
    start = [f"ckpt_path={summary['train']['checkpoint']}", "weights_only=true", "trainer.accelerator=cpu"]
    start += [f"trainer.devices={num_ranks}", *options("perceptron", num_ranks)]
    plain = values_of_script(code, str(config), tmp_path, *start, command="test")
    assert plain.keys() == {"test/loss"}
    assert values_of_run(summary["run_id"], plain) == plain
    assert summary["metrics"].keys() == {"train/loss", "val/accuracy", "test/loss"}
    assert summary["not_measured"] == ["energy"]
    assert summary["time_budget"]["test"] > 0


@pytest.mark.slow
def test_a_subclass_of_lightning_cli_has_the_values_of_its_script(paceline, tmp_path, code):
    (code / "main.py").write_text(
        "from optimizers import LinkedCLI\n\nif __name__ == '__main__':\n    LinkedCLI(save_config_callback=None)\n"
    )
    config = str(code / "configs" / "sections.yaml")
    own = ["data.init_args.width=6", "note=x", "stop_early.patience=1", "stop_early.min_delta=1000"]
    trainer = ["trainer.log_every_n_steps=1", "trainer.max_epochs=9"]
    alone = ["trainer.enable_progress_bar=false", "trainer.accelerator=cpu", "trainer.devices=1"]
    plain = values_of_script(code, config, tmp_path, *own, *trainer, *alone)
    assert len(plain["loss_epoch"]) == 2, "its callback stops it"
    command = ["run", config, "--code", str(code), "--json", "cli=optimizers.LinkedCLI"]
    process = paceline(*command, *own, *trainer, "speedup.max_seconds=3")
    out, said = process.communicate(timeout=200)
    assert process.returncode == 0, said
    summary = json.loads(out.splitlines()[-1])
    assert values_of_run(summary["run_id"], plain) == plain
    assert summary["speedup"]["ratio"] > 0


DOCUMENTED = {"autoencoder": "train_loss", "configured": "train_loss", "gan": "judge_loss"}
"""Modules of the shapes that Lightning's documentation shows, and a metric of each."""


def run_with_a_killed_rank(paceline, code, name, *settings):
    """The summary of a run that restarts once, since a rank is killed after the first checkpoint."""
    process = paceline("run", str(code / "configs" / f"{name}.yaml"), "--code", str(code), "--json", *settings)
    wait_for_checkpoint(process, "step-*.ckpt")
    ranks_of(process)[-1].send_signal(signal.SIGKILL)
    out, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    summary = json.loads(out.splitlines()[-1])
    assert len(summary["train"]["restarts"]) == 1
    return summary


@pytest.mark.slow
@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_killed_rank_leaves_the_values_of_the_script(paceline, tmp_path, code, name):
    trainer = ["log_every_n_steps=1", "max_epochs=20", "max_steps=-1", *options(name, 2)]
    trainer = [one if one.startswith("trainer.") else f"trainer.{one}" for one in trainer]
    trainer.append("data.init_args.num_samples=1600")  # 50 batches of an epoch on each rank
    alone = ["trainer.enable_progress_bar=false", "trainer.accelerator=cpu", "trainer.devices=2"]
    plain = values_of_script(code, f"configs/{name}.yaml", tmp_path, *trainer, *alone)
    settings = ["execution.num_devices=2", "execution.checkpoint_steps=40", "speedup.baseline=none", *trainer]
    summary = run_with_a_killed_rank(paceline, code, name, *settings)
    exact = {metric: values for metric, values in plain.items() if not metric.endswith("_epoch")}
    assert values_of_run(summary["run_id"], exact) == exact
    for metric in plain.keys() - exact.keys():  # the mean over the epoch that was resumed inside is of its rest
        values = values_of_run(summary["run_id"], [metric])[metric]
        assert sum(own != theirs for own, theirs in zip(values, plain[metric], strict=True)) <= 1


@pytest.mark.slow
def test_a_module_that_shards_itself_learns_as_with_ddp_though_a_rank_is_killed(paceline, tmp_path, code):
    trainer = [f"trainer.{one}" for one in ("log_every_n_steps=1", "max_epochs=20", "max_steps=-1")]
    trainer.append("data.init_args.num_samples=1600")  # 50 batches of an epoch on each rank
    alone = [
        "trainer.enable_progress_bar=false",
        "trainer.accelerator=cpu",
        "trainer.devices=2",
        "trainer.strategy=ddp",
    ]
    plain = values_of_script(code, "configs/configured.yaml", tmp_path, *trainer, *alone)
    settings = ["execution.num_devices=2", "execution.strategy=fsdp", "execution.checkpoint_steps=40"]
    summary = run_with_a_killed_rank(paceline, code, "configured", *settings, "speedup.baseline=none", *trainer)
    of_steps = {name: pytest.approx(each, rel=1e-3) for name, each in plain.items() if not name.endswith("_epoch")}
    assert of_steps == values_of_run(summary["run_id"], of_steps)


@pytest.mark.slow
def test_a_module_that_shards_itself_is_measured_and_learns_as_with_ddp(paceline, tmp_path, code):
    trainer = ["log_every_n_steps=1", "enable_progress_bar=false", "accelerator=cpu", "devices=2", "strategy=ddp"]
    plain = values_of_script(code, "configs/configured.yaml", tmp_path, *(f"trainer.{one}" for one in trainer))
    settings = ["execution.num_devices=2", "execution.strategy=fsdp", "speedup.max_seconds=3"]
    command = ["run", str(code / "configs/configured.yaml"), "--code", str(code), "--json", *settings]
    process = paceline(*command, "trainer.log_every_n_steps=1")
    out, said = process.communicate(timeout=200)
    assert process.returncode == 0, said
    summary = json.loads(out.splitlines()[-1])
    own = values_of_run(summary["run_id"], plain)
    assert {name: pytest.approx(values, rel=1e-4) for name, values in plain.items()} == own
    assert "fsdp" in summary["speedup"]["candidate"]
    assert summary["speedup"]["of_limit"] is not None, "operations are counted on one device"


@pytest.mark.slow
def test_manual_optimization_on_shared_weights_is_refused(paceline, code):
    settings = ["execution.num_devices=2", "execution.strategy=fsdp", "speedup.baseline=none"]
    process = paceline("run", str(code / "configs/gan.yaml"), "--code", str(code), *settings)
    _, said = process.communicate(timeout=200)
    assert process.returncode == 2, said
    assert "execution.strategy=fsdp cannot be used with manual optimization" in said
    assert "execution.strategy=ddp" in said


@pytest.mark.slow
@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_study_compares_its_settings(paceline, code, name):
    axis = ["--axis", "data.init_args.batch_size=16,32", "--minimize", DOCUMENTED[name], "--repeats", "1"]
    process = paceline("study", str(code / "configs" / f"{name}.yaml"), "--code", str(code), "--json", *axis)
    out, said = process.communicate(timeout=280)
    assert process.returncode == 0, said
    summary = json.loads(out.splitlines()[-1])
    assert [arm["num_failed"] for arm in summary["arms"]] == [0, 0]
    assert all(arm["score"] > 0 for arm in summary["arms"])
