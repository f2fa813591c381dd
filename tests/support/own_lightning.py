"""Own Lightning code: the example of `tests/packages/text`, and what a plain script and a run log."""

import csv
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import psutil
from mlflow.tracking import MlflowClient

from paceline.conf.environment import Environment
from paceline.tasks.names import metric_name
from paceline.tasks.train.launch.heartbeat import Heartbeat
from paceline.tasks.train.rank.time_budget import Stopwatch
from tests.conftest import RANK_MODULE

QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "enable_checkpointing": False}
"""Options of a Trainer that writes nothing."""
PACKAGE = Path(__file__).parents[1] / "packages" / "text"
SMALL = ["model.init_args.width=16", "data.init_args.num_bytes=40000", "trainer.accelerator=cpu"]


def values_of_script(code, config, directory, *overrides, command="fit"):
    """All values that `python main.py fit`, or `test`, logs in a directory of code, by name and in their order."""
    options = [f"--{override}" for override in (*overrides, f"trainer.default_root_dir={directory}")]
    done = subprocess.run(
        [sys.executable, "main.py", command, "--config", config, *options],
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
            for name in row.keys() - {"epoch", "step"}:
                if row[name]:
                    values[name].append(float(row[name]))
    return values


def values_of_run(run_id, names):
    """The values of some metrics of a finished run, by name and in the order of their steps."""
    client = MlflowClient(Environment().tracking_uri)
    assert client.get_run(run_id).info.status == "FINISHED"
    histories = {name: client.get_metric_history(run_id, metric_name(name)) for name in names}
    return {
        name: [metric.value for metric in sorted(history, key=lambda metric: metric.step)]
        for name, history in histories.items()
    }


def wait_for_checkpoint(process, name):
    """Wait until the run of a process has a checkpoint; the id of the run."""
    deadline = time.monotonic() + 120
    before = set(Environment().root.glob(f"runs/*/checkpoints/{name}"))
    while not (found := set(Environment().root.glob(f"runs/*/checkpoints/{name}")) - before):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found.pop().parents[1].name


def ranks_of(process):
    """The running ranks of a command."""
    return [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if RANK_MODULE in " ".join(child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE
    ]


def train(spec):
    """Train as a rank of a specification does, in this process; its result."""
    from paceline.tasks.train.lightning.fit import fit_module

    return fit_module(spec, Stopwatch("startup"), Heartbeat())
