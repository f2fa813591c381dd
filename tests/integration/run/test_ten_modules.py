"""Ten modules that nobody changed for Paceline, from their LightningCLI files: the values of `python main.py fit`."""

import csv
import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from paceline.conf.environment import Environment

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


def values_of_script(name, num_ranks, code, directory):
    """All that the plain script logs, by name."""
    trainer = ["log_every_n_steps=1", f"default_root_dir={directory}", "enable_progress_bar=false", "accelerator=cpu"]
    overrides = [f"trainer.{one}" for one in (*trainer, f"devices={num_ranks}")] + options(name, num_ranks)
    command = [sys.executable, "main.py", "fit", "--config", f"configs/{name}.yaml"]
    done = subprocess.run(
        [*command, *(f"--{one}" for one in overrides)],
        cwd=code,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    values = defaultdict(list)
    with (directory / "lightning_logs" / "version_0" / "metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            for key in row.keys() - {"epoch", "step"}:
                if row[key]:
                    values[key].append(float(row[key]))
    return values


def values_of_run(run_id, names):
    client = MlflowClient(Environment().tracking_uri)
    assert client.get_run(run_id).info.status == "FINISHED"
    histories = {name: client.get_metric_history(run_id, name) for name in names}
    return {
        name: [metric.value for metric in sorted(history, key=lambda metric: metric.step)]
        for name, history in histories.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_the_script(paceline, tmp_path, name, num_ranks):
    code = tmp_path / "code"
    shutil.copytree(PACKAGE, code)
    plain = values_of_script(name, num_ranks, code, tmp_path)
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
