"""Goal 17: own Lightning code in Paceline against `python main.py fit`: batches per second, start and end.

infra/bench 17          about 17 minutes on two quiet cores

Start and end: whole processes, A B B A, three blocks. Batches per second: of these, and of pairs of trainings that live
at the same time, of which one is stopped while the other runs, A B B A: a machine changes little within a few seconds.
Two processes of the same program keep a difference of some percent, so each pair is new, and counts once. The same
callback of the module's author writes when each batch ended.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress

import numpy as np
import psutil
import pytest

from paceline.tasks.measure.paired_ratio import FIXED_CONFIDENCE, estimate_ratio, location_interval
from tests.benchmarks.conftest import HERE, PROGRAM, at_least, at_most, tell
from tests.support.own_lightning import PACKAGE

pytestmark = pytest.mark.timeout(3600)

NUM_BLOCKS = 3
WARM_UP = 100
"""Batches that do not count."""
SETTINGS = ["trainer.limit_val_batches=0", "trainer.log_every_n_steps=50"]
NUM_PAIRS = 8
NUM_TURNS = 8
"""Of each of two live trainings. They are short, because a rank ends after 10 s without its coordinator."""
TURN_SECONDS = 2.0
SETTLE_SECONDS = 0.3
"""First part of a turn that does not count."""


def command_of(side, code, directory, num_epochs):
    """The command of a side, and its environment."""
    settings = [*SETTINGS, f"trainer.max_epochs={num_epochs}", f"data.init_args.directory={code / 'data'}"]
    settings += ["trainer.callbacks+=batch_times.BatchTimes", f"trainer.callbacks.path={directory / 'times'}"]
    environment = os.environ | {"PACELINE_HOME": str(code.with_name("home")), "PYTHONWARNINGS": "ignore"}
    if side == "script":
        options = [f"--{setting}" for setting in (*settings, f"trainer.default_root_dir={directory}")]
        return [sys.executable, "main.py", "fit", "--config", "config.yaml", *options], environment
    return [PROGRAM, "run", "config.yaml", "--code", ".", "--json", "speedup.baseline=none", *settings], environment


def batch_ends(directory):
    """Seconds since the epoch at which batches have ended so far."""
    file = directory / "times"
    return np.array(file.read_text().split() if file.exists() else [], dtype=float)


def timed(side, code, directory):
    """Batches per second after the warm-up; seconds to the end of the first batch, and from the last one to the end."""
    directory.mkdir()
    command, environment = command_of(side, code, directory, 4)
    started = time.time()
    done = subprocess.run(command, cwd=code, env=environment, capture_output=True, text=True, check=False)
    ended = time.time()
    assert done.returncode == 0, done.stderr
    ends = batch_ends(directory)
    return (len(ends) - WARM_UP) / (ends[-1] - ends[WARM_UP - 1]), ends[0] - started, ended - ends[-1]


class Live:
    """A training without an end, with all its processes."""

    def __init__(self, side, code, directory):
        directory.mkdir()
        self._directory = directory
        command, environment = command_of(side, code, directory, 10**6)
        with (directory / "log").open("w") as log:
            self._process = psutil.Popen(command, cwd=code, env=environment, stdout=log, stderr=log)

    def warm_up(self):
        while len(batch_ends(self._directory)) < WARM_UP:
            assert self._process.poll() is None
            time.sleep(0.5)
        self._signal(signal.SIGSTOP)

    def take_turn(self):
        """Run for a while, then stop; returns from when to when batches count."""
        began = time.time()
        self._signal(signal.SIGCONT)
        time.sleep(TURN_SECONDS)
        ended = time.time()
        self._signal(signal.SIGSTOP)
        return began + SETTLE_SECONDS, ended

    def rates(self, turns):
        """Batches per second of each turn."""
        ends = batch_ends(self._directory)
        inside = [ends[(ends > first) & (ends < last)] for first, last in turns]
        return np.array([(len(part) - 1) / (part[-1] - part[0]) for part in inside])

    def close(self):
        self._signal(signal.SIGCONT)
        self._process.terminate()
        self._process.wait(120)

    def _signal(self, number):
        for process in (self._process, *self._process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)


@pytest.fixture
def code(tmp_path):
    """A directory of own code, with the callbacks of this benchmark."""
    code = shutil.copytree(PACKAGE, tmp_path / "code")
    shutil.copy(HERE / "batch_times.py", code)
    return code


def compare_a_pair(code, directory):
    """Two new trainings, by turns: log of Paceline's batches per second over the script's, and the script's."""
    sides = {}
    directory.mkdir()
    with ExitStack() as stack:
        for side in ("script", "paceline"):  # in this order: a script can be stopped for as long as a start takes
            sides[side] = Live(side, code, directory / side)
            stack.callback(sides[side].close)
            sides[side].warm_up()
        turns = {side: [] for side in sides}
        for turn in range(NUM_TURNS):
            for side in sorted(sides, reverse=bool(turn % 2)):
                turns[side].append(sides[side].take_turn())
    script, ours = (sides[side].rates(turns[side]) for side in ("script", "paceline"))
    return np.median(np.log(ours / script)), np.median(script)


def test_goal_17_batches_of_live_trainings_by_turns(code, tmp_path):
    pairs = [compare_a_pair(code, tmp_path / f"pair-{number}") for number in range(NUM_PAIRS)]
    logs, rates = np.array(pairs).T
    ratio = estimate_ratio(logs, FIXED_CONFIDENCE)
    tell(
        "goal 17: batches per second of own code over Lightning's Trainer, by turns >= 0.98",
        f"{ratio.value:.3f} ({NUM_PAIRS} pairs of processes; {np.median(rates):.1f} batches/s in the script)",
        f"{ratio.low:.3f} to {ratio.high:.3f}",
        at_least(ratio.low, ratio.high, 0.98),
    )


def test_goal_17_own_code_against_lightning(code, tmp_path):
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
