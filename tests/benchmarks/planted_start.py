"""One fresh start with a planted ratio: python -m tests.benchmarks.planted_start TRIAL; prints its probe as JSON.

TRIAL is JSON: `part`, `ratio`, `kind`, `sd`, `seed`, the `settings` of the probe; for real work the `spec` of a rank.
"""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from paceline.conf.config import Speedup
from paceline.tasks.measure.probe import run_probe
from tests.support.planted_ratios import PlantedArms, SleepingClock

UNITS = 50  # training steps in a step of the candidate; the baseline's are to those as the ratio
NEIGHBOUR = """
import random, time
while True:
    end = time.perf_counter() + random.expovariate(1 / 0.7)
    while time.perf_counter() < end:
        pass
    time.sleep(random.expovariate(1 / 1.5))
"""


def asleep(trial, settings):
    """A probe of arms that sleep, whose noise is planted too."""
    arms = PlantedArms(trial["ratio"], trial["kind"], trial["seed"], trial["sd"], SleepingClock())
    return run_probe(arms.runners(), settings)


def at_work(trial, settings):
    """A probe of a network's own training steps, so many more in a step of the baseline's as the ratio says."""
    from paceline.tasks.records.execution import BASELINE
    from paceline.tasks.train.rank.benchmark import ArmBenchmark
    from paceline.tasks.train.rank.context import RankContext
    from paceline.tasks.train.rank_spec import RankSpec

    context = RankContext(RankSpec.model_validate_json(Path(trial["spec"]).read_text()))
    context.build_network()
    bench = ArmBenchmark(context)
    arm = BASELINE.model_copy(update={"loading": "resident"})
    units = {"candidate": 1, "baseline": 1}
    if trial["part"] != "identical":
        units = {"candidate": UNITS, "baseline": round(UNITS * trial["ratio"])}
    with ExitStack() as stack:
        runners = {role: repeated(bench.runner(stack, arm), number) for role, number in units.items()}
        if trial["kind"] == "neighbour":
            neighbour = subprocess.Popen([sys.executable, "-c", NEIGHBOUR], start_new_session=True)
            stack.callback(neighbour.kill)
        return run_probe(runners, settings, watch=bench.watch)


def repeated(runner, number):
    """An arm whose step is `number` steps of another."""

    def run(num_steps):
        times = runner.run(num_steps * number)
        return [sum(times[first : first + number]) for first in range(0, len(times), number)]

    return replace(runner, run=run)


def main(text):
    trial = json.loads(text)
    probe = (at_work if trial["spec"] else asleep)(trial, Speedup(**trial["settings"]))
    print(probe.model_dump_json(), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
