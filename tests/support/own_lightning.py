"""Own Lightning code: the example of `tests/packages/text`, and what a plain script and a run log."""

import csv
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from mlflow.tracking import MlflowClient

from paceline.conf.environment import Environment

PACKAGE = Path(__file__).parents[1] / "packages" / "text"
SMALL = ["model.init_args.width=16", "data.init_args.num_bytes=40000", "trainer.accelerator=cpu"]


def values_of_script(code, config, directory, *overrides):
    """All values that `python main.py fit` logs in a directory of code, by name and in their order."""
    options = [f"--{override}" for override in (*overrides, f"trainer.default_root_dir={directory}")]
    done = subprocess.run(
        [sys.executable, "main.py", "fit", "--config", config, *options],
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
    histories = {name: client.get_metric_history(run_id, name) for name in names}
    return {
        name: [metric.value for metric in sorted(history, key=lambda metric: metric.step)]
        for name, history in histories.items()
    }
