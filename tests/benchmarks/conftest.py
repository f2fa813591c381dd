import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.tasks.records.measurement import Measurement, MeasureResult, ProbeResult
from paceline.tasks.train.launch.coordinator import measure_group
from paceline.tasks.train.launch.layout import rank_environment
from tests.support.jobs import new_job, two_workers

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
PROGRAM = str(Path(sys.executable).with_name("paceline"))
SECONDS = 60
"""Of a measurement."""


@pytest.fixture(scope="session")
def cluster_address():
    """Two workers on this host."""
    with two_workers() as address:
        yield address


@pytest.fixture(scope="session")
def make_job(cluster_address):
    """Builds a job that measures and trains nothing."""

    def make(preset, *overrides):
        return new_job(cluster_address, preset, ["speedup.baseline=none", *overrides])

    return make


def measure(job, address, arms, messages=()):
    """What the job's group measures instead of training."""
    measurement = Measurement(arms=arms, all_reduce_bytes=messages)
    return measure_group(job.model_copy(update={"measurement": measurement}), address, MeasureResult)


def in_a_rank(job, what, directory):
    """A probe in a process like the job's only rank."""
    return ProbeResult.model_validate_json(said_in_a_rank(job, what, directory))


def said_in_a_rank(job, what, directory):
    """What is said there last."""
    spec = json.loads((job.directory / "attempt-0" / "rank-0" / "spec.json").read_text())
    rank = directory / "attempt-0" / "rank-0"  # as of a run: a checkpoint is written for the newest attempt only
    spec |= {"directory": str(rank), "checkpoint_directory": str(directory / "checkpoints")}
    rank.mkdir(parents=True)
    (directory / "spec.json").write_text(json.dumps(spec))
    command = [sys.executable, HERE / "in_a_rank.py", directory / "spec.json", what, SECONDS]
    environment = rank_environment(os.environ, job.plan.num_threads, None, tuple(spec["devices"]))
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    return last_line(command, environment)


def paceline(home, *arguments, **environment):
    """What a command of the program says with `--json`, Unix time of its start, and seconds that it took."""
    began, started = time.time(), time.monotonic()
    said = last_line([PROGRAM, *arguments, "--json"], os.environ | {"PACELINE_HOME": str(home)} | environment)
    return json.loads(said), began, time.monotonic() - started


def as_installed():
    """This process's environment, without what a cluster in it has set for its own processes."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "MKL_", "MALLOC_"))}


def last_line(command, environment):
    """What a process says last; its log where it fails."""
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    return lines[-1] if lines else ""


def tell(goal, value, interval, verdict):
    """One line per goal: what was asked, what was measured, how certain, and whether it is met."""
    print(f"\n{goal} | {value} | {interval} | {verdict}", flush=True)
    if path := os.environ.get("BENCH_JSON"):
        with Path(path).open("a") as lines:
            lines.write(json.dumps({"goal": goal, "value": value, "interval": interval, "verdict": verdict}) + "\n")


def at_most(low, high, bar):
    """The verdict on an interval that is to lie at or below a bar."""
    if high <= bar:
        return "met"
    return "NOT MET" if low > bar else "undecided: the interval contains the bar"


def at_least(low, high, bar):
    """The verdict on an interval that is to lie at or above a bar."""
    if low >= bar:
        return "met"
    return "NOT MET" if high < bar else "undecided: the interval contains the bar"
