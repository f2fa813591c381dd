"""Goal 17: own Lightning code in Paceline against `python main.py fit`: batches per second, start and end.

infra/bench 17          about 6 minutes on two quiet cores

Whole processes, A B B A, three blocks. The same callback of the module's author writes when each batch ended.
"""

import json
import os
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

from paceline.tasks.measure.paired_ratio import FIXED_CONFIDENCE, estimate_ratio, location_interval
from tests.benchmarks.conftest import HERE, PROGRAM, at_least, at_most, tell
from tests.support.own_lightning import PACKAGE

pytestmark = pytest.mark.timeout(3600)

NUM_BLOCKS = 3
WARM_UP = 100
"""Batches that do not count."""
SETTINGS = ["trainer.max_epochs=4", "trainer.limit_val_batches=0", "trainer.log_every_n_steps=50"]


def timed(side, code, directory):
    """Batches per second after the warm-up; seconds to the end of the first batch, and from the last one to the end."""
    directory.mkdir()
    times = directory / "times.json"
    callback = ["trainer.callbacks+=batch_times.BatchTimes", f"trainer.callbacks.path={times}"]
    settings = [*SETTINGS, f"data.init_args.directory={code / 'data'}", *callback]
    environment = os.environ | {"PACELINE_HOME": str(code.with_name("home")), "PYTHONWARNINGS": "ignore"}
    if side == "script":
        options = [f"--{setting}" for setting in (*settings, f"trainer.default_root_dir={directory}")]
        command = [sys.executable, "main.py", "fit", "--config", "config.yaml", *options]
    else:
        command = [PROGRAM, "run", "config.yaml", "--code", ".", "--json", "speedup.baseline=none", *settings]
    started = time.time()
    done = subprocess.run(command, cwd=code, env=environment, capture_output=True, text=True, check=False)
    ended = time.time()
    assert done.returncode == 0, done.stderr
    ends = json.loads(times.read_text())
    return (len(ends) - WARM_UP) / (ends[-1] - ends[WARM_UP - 1]), ends[0] - started, ended - ends[-1]


def test_goal_17_own_code_against_lightning(tmp_path):
    code = shutil.copytree(PACKAGE, tmp_path / "code")
    shutil.copy(HERE / "batch_times.py", code)
    for side in ("script", "paceline"):  # data, databases and bytecode are there
        timed(side, code, tmp_path / f"first-{side}")
    found = {"script": [], "paceline": []}
    for block in range(NUM_BLOCKS):
        for number, side in enumerate(("script", "paceline", "paceline", "script")):
            found[side].append(timed(side, code, tmp_path / f"{block}-{number}"))
    rates, starts, exits = (
        np.array([[one[part] for one in found[side]] for side in ("paceline", "script")]) for part in range(3)
    )
    ratio = estimate_ratio(np.log(rates[0] / rates[1]), FIXED_CONFIDENCE)
    tell(
        "goal 17: batches per second of own code over Lightning's Trainer >= 0.98",
        f"{ratio.value:.3f} ({len(rates[0])} pairs; {np.median(rates[1]):.1f} batches/s in the script)",
        f"{ratio.low:.3f} to {ratio.high:.3f}",
        at_least(ratio.low, ratio.high, 0.98),
    )
    more, low, high = location_interval(starts[0] - starts[1], FIXED_CONFIDENCE)
    tell(
        "goal 17: seconds from the start to the first step, more than the script <= 3",
        f"{more:.2f} ({np.median(starts[0]):.1f} against {np.median(starts[1]):.1f})",
        f"{low:.2f} to {high:.2f}",
        at_most(low, high, 3.0),
    )
    more, low, high = location_interval(exits[0] - exits[1], FIXED_CONFIDENCE)
    tell(
        "goal 17: seconds from the last step to the recorded run, more than the script to its exit",
        f"{more:.2f} ({np.median(exits[0]):.1f} against {np.median(exits[1]):.1f})",
        f"{low:.2f} to {high:.2f}",
        "measured",
    )
