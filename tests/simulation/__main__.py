"""Plays simulated histories: `python -m tests.simulation --seeds 10000`, or one again with `--seed N`."""

import argparse
import sys
import time
from collections import Counter

from tests.simulation import shrink, world
from tests.simulation.patches import simulated


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="number of histories")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seed", type=int, help="play one history and print it")
    parser.add_argument("--shrink", action="store_true", help="print a failing history with as few faults as possible")
    options = parser.parse_args()
    if options.seed is not None:
        sys.exit(replay(options.seed, options.shrink))
    started, failed, totals = time.process_time(), {}, Counter()
    with simulated():
        for seed in range(options.first, options.first + options.seeds):
            outcome = world.run(seed)
            totals.update(faults=len(outcome.faults), attempts=outcome.num_attempts, events=outcome.num_events)
            totals.update(seconds=round(outcome.seconds))
            if outcome.violation:
                failed[seed] = outcome.violation
                print(f"seed {seed}: {outcome.violation.splitlines()[0]}", flush=True)
    seconds = time.process_time() - started
    print(
        f"{options.seeds} histories in {seconds:.1f} CPU-seconds ({1000 * seconds / options.seeds:.1f} ms each): "
        f"{totals['seconds'] / 3600:.0f} simulated hours, {totals['faults']} faults, {totals['attempts']} attempts, "
        f"{totals['events']} events; {len(failed)} violations"
    )
    sys.exit(bool(failed))


def replay(seed, shrinks):
    with simulated(with_logs=True):
        outcome = world.run(seed, keep_trace=True)
        if shrinks and outcome.violation:
            outcome = world.run(seed, shrink.shorten(outcome), keep_trace=True)
    print("\n".join(outcome.trace))
    print("faults:", *outcome.faults, sep="\n  ")
    print(outcome.violation or "no violation")
    return bool(outcome.violation)


if __name__ == "__main__":
    main()
