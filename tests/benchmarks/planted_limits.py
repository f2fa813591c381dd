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
from collections import defaultdict
from pathlib import Path

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


def print_table(lines):
    print(f"{'planted':<16} {'named':>6} {'of':>3}  {'contaminated':>12}  named instead")
    by_name = defaultdict(list)
    for line in lines:
        by_name[line["planted"]].append(line)
    for name, ones in by_name.items():
        named = sum(one["is_named"] for one in ones)
        contaminated = sum(bool(one["contaminated"]) for one in ones)
        others = sorted({str(one["bottleneck"]) for one in ones if not one["is_named"]})
        print(f"{name:<16} {named:>6} {len(ones):>3}  {contaminated:>12}  {', '.join(others)}")


def main(folder, repeats=REPEATS, names=()):
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("PACELINE_HOME", str(folder / "home"))
    results = folder / "results.jsonl"
    lines = [json.loads(text) for text in results.read_text().splitlines()] if results.exists() else []
    with two_workers() as address:
        for repeat in range(repeats):
            for name in names or LIMITS:
                if any((line["planted"], line["repeat"]) == (name, repeat) for line in lines):
                    continue
                is_run = LIMITS[name].is_run
                result = in_a_run(name, folder) if is_run else in_a_group(name, folder, address)
                keys = ("bottleneck", "cause", "contaminated", "verdict", "diagnosis", "shares")
                line = {"planted": name, "repeat": repeat, "is_named": LIMITS[name].is_named(result)}
                line |= {key: result[key] for key in keys}
                lines.append(json.loads(json.dumps(line)))
                with results.open("a") as file:
                    print(json.dumps(line), file=file)
                print(f"{name} {repeat}: {'named' if line['is_named'] else line['bottleneck']}", flush=True)
    print_table(lines)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), int(sys.argv[2]) if len(sys.argv) > 2 else REPEATS, sys.argv[3:])
