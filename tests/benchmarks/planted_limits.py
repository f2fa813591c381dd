"""Ten planted limits: python -m tests.benchmarks.planted_limits RESULTS [REPEATS] [NAME ...].

Plants each limit ten times in fresh processes and counts how often Paceline names it. RESULTS is a folder: every
measurement is a line of `results.jsonl` in it, so that an interrupted benchmark resumes, and the table is printed at
the end. `two wide layers` is the step of two layers of 2,048 units at 256 samples that was called launch-bound. It
needs a quiet machine of two cores; 110 measurements take about an hour.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.benchmarks.planted_repeats import count_named, use_folder
from tests.integration.conftest import SMALL
from tests.support.jobs import new_job, two_workers
from tests.support.limits import LIMITS, NETWORKS, measure_limit
from tests.support.own_package import install

REPEATS = 10


def in_a_run(name, folder):
    """The JSON of a run's speedup."""
    site = folder / "site"
    if not site.exists():
        install(site, "traffic", {"net": NETWORKS}, models={"traffic": "net:Traffic", "layers": "net:Layers"})
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    command = [str(Path(sys.executable).with_name("paceline")), "run", "digits", "--diagnose", "--json"]
    done = subprocess.run(
        [*command, *LIMITS[name].overrides],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
    )
    return json.loads(done.stdout.splitlines()[-1])["speedup"]


def in_a_group(name, folder, address):
    """The JSON of the result of a group of ranks."""

    def make(*overrides):
        return new_job(address, "digits", [*SMALL, *overrides])

    return measure_limit(name, make, address, folder / "heat")[1].model_dump(mode="json")


def main(folder, repeats=REPEATS, names=()):
    use_folder(folder)
    with two_workers() as address:

        def measure(name):
            return in_a_run(name, folder) if LIMITS[name].is_run else in_a_group(name, folder, address)

        def is_named(name, result):
            return LIMITS[name].is_named(result)

        count_named(folder, repeats, names or LIMITS, measure, is_named, "bottleneck")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), int(sys.argv[2]) if len(sys.argv) > 2 else REPEATS, sys.argv[3:])
