"""Compare `paceline watch` with TraceML on scripts with planted causes: verdicts, overhead, seconds to the card.

    python -m tests.benchmarks.watch_peers "COMMAND" [--repeats 3] [--steps 300,900] [SCRIPT...]

COMMAND runs a script under TraceML, for example "traceml run". The ways alternate in each repeat. Steps per second come
from the difference between a short and a long training, so that neither the start nor the card is in them. Their ratio
to plain Python's is taken within each repeat; three or more repeats give its interval. The seconds until the card are
those that a way takes more than plain Python in the short training, start included. Needs a quiet machine.
"""

import argparse
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from paceline.tasks.measure.paired_ratio import FIXED_CONFIDENCE, estimate_ratio

SCRIPTS = Path(__file__).parents[1] / "packages" / "scripts"
VERDICT = re.compile(r"verdict  (.*)|\b([A-Z]+[- ](?:BOUND|HEAVY|STRAGGLER)[^\n]*)")


def seconds_of(command, script, num_steps):
    """Wall seconds of a training, and what it printed."""
    with tempfile.TemporaryDirectory() as directory:
        environment = os.environ | {"NUM_STEPS": str(num_steps), "PACELINE_HOME": f"{directory}/paceline"}
        started = time.monotonic()
        done = subprocess.run(
            [*command, str(script)], env=environment, cwd=directory, capture_output=True, text=True, check=False
        )
        return time.monotonic() - started, done.stdout + done.stderr


def compare(script, ways, lengths, repeats):
    """Rows of one script: way, steps per second over plain Python's, seconds more than its, verdict."""
    times = {name: {length: [] for length in lengths} for name in ways}
    verdicts = {}
    for repeat in range(repeats):
        names = [*ways] if repeat % 2 == 0 else [*reversed(ways)]
        for length in lengths:
            for name in names:
                seconds, text = seconds_of(ways[name], script, length)
                times[name][length].append(seconds)
                found = VERDICT.search(text)
                verdicts[name] = (found[1] or found[2])[:100] if found else "none"
    short, long = lengths
    typical = {name: {length: statistics.median(times[name][length]) for length in lengths} for name in ways}
    steps = {name: np.subtract(times[name][long], times[name][short]) / (long - short) for name in ways}  # seconds
    for name in ways:
        more = typical[name][short] - typical["plain"][short]
        ratio = estimate_ratio(np.log(steps["plain"] / steps[name]), FIXED_CONFIDENCE)
        ends = "" if ratio.low is None else f"{ratio.low:.3f} to {ratio.high:.3f}"
        text = f"{1 / np.median(steps[name]):8.1f} {ratio.value:6.3f} {ends:<14} {more:6.1f}"
        print(f"{script.stem:<26} {name:<9} {text}  {verdicts[name]}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command")
    parser.add_argument("scripts", nargs="*")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", default="300,900")
    options = parser.parse_args()
    ways = {
        "plain": [sys.executable],
        "paceline": [sys.executable, "-m", "paceline.flows.cli", "watch"],
        "traceml": shlex.split(options.command),
    }
    lengths = [int(number) for number in options.steps.split(",")]
    print(f"{'script':<26} {'way':<9} {'steps/s':>8} {'ratio':>6} {'interval':<14} {'more s':>6}  verdict")
    for script in sorted(SCRIPTS.glob("*_*.py")):
        if not options.scripts or script.stem in options.scripts:
            compare(script, ways, lengths, options.repeats)


if __name__ == "__main__":
    main()
