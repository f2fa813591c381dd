import json
import os
from pathlib import Path

import pytest

from tasks.records import Measurement
from tasks.train.coordinate import measure_group
from tests.jobs import new_job, two_workers


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
