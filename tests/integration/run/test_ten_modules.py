"""Ten modules that nobody changed for Paceline, from their LightningCLI files: the values of `python main.py fit`."""

import json
import shutil
from pathlib import Path

import pytest

from tests.support.own_lightning import values_of_run, values_of_script

pytest.importorskip("jsonargparse", reason="LightningCLI needs it; infra/install brings it")

PACKAGE = Path(__file__).parents[2] / "packages" / "shapes"
NAMES = sorted(path.stem for path in (PACKAGE / "configs").glob("*.yaml"))
TURNS = {"gan"}
"""Modules in whose steps some weights have no gradient."""


def options(name, num_ranks):
    """Overrides of the trainer, in the words of LightningCLI."""
    if num_ranks == 1:
        return []
    return [f"trainer.strategy=ddp{'_find_unused_parameters_true' if name in TURNS else ''}"]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_the_script(paceline, tmp_path, name, num_ranks):
    code = tmp_path / "code"
    shutil.copytree(PACKAGE, code)
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
