import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tasks.records import Measurement, ProbeResult
from tasks.train.coordinate import measure_group
from tasks.train.launch import rank_environment
from tests.jobs import new_job, two_workers

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
    return measure_group(
        job.model_copy(update={"measurement": Measurement(arms=arms, all_reduce_bytes=messages)}), address
    )


def in_a_rank(job, what, directory):
    """A probe in a process like the job's only rank."""
    return ProbeResult.model_validate_json(said_in_a_rank(job, what, directory))


def said_in_a_rank(job, what, directory):
    """What is said there last."""
    spec = json.loads((job.directory / "attempt-0" / "rank-0" / "spec.json").read_text())
    spec |= {"directory": str(directory / "rank"), "checkpoint_directory": str(directory / "checkpoints")}
    (directory / "rank").mkdir()
    (directory / "spec.json").write_text(json.dumps(spec))
    command = [sys.executable, str(Path(__file__).with_name("in_a_rank.py")), str(directory / "spec.json"), what]
    environment = rank_environment(os.environ, job.plan.num_threads, None, ()) | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, str(SECONDS)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def run_paceline(home, *arguments, **environment):
    """The outcome of `paceline run`, Unix time of its start, and seconds that it took."""
    began, started = time.time(), time.monotonic()
    done = subprocess.run(
        [PROGRAM, "run", *arguments, "--json"],
        env=os.environ | {"PACELINE_HOME": str(home)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.monotonic() - started
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), began, seconds


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
