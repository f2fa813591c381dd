"""Goal 15, simulated: python -m tests.benchmarks.simulate_nights [OTAVA_PYTHON]; about ten minutes on one core.

False alarms, power and average run length of the judgement of nights, for each kind of noise. With the Python of an
environment that has apache-otava (0.8), F1 against it on the same series, both with the ratio and with raw throughput:
simulated series, and real ones (`nights.json`, of `collect_nights`), turned by a random number of nights.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from paceline.tasks.speedup.nights.regression import RunMetrics
from tests.support.ordinary_nights import alarms, ordinary_series, slowed

REAL = Path(__file__).with_name("nights.json")

SEED = 25
YEARS = 40
TRIALS = 300
KINDS = {
    "normal 0.5 %": {"own_sd": 0.005},
    "normal 1 %": {"own_sd": 0.01},
    "t 1 %": {"own_sd": 0.01, "heavy": True},
    "normal 1.5 %": {"own_sd": 0.015},
    "t 1.5 %": {"own_sd": 0.015, "heavy": True},
    "normal 2 %": {"own_sd": 0.02},
    "normal 1 %, ratio of hosts 2 %": {"own_sd": 0.01, "host_ratio_sd": 0.02},
}
NIGHTS, PLANTED, IN_TIME = 150, (70, 140), (3, 7)
LOSSES = (0.05, 0.07, 0.1, 0.15)
MAGNITUDES = (0.0, 0.03, 0.05)


def false_alarms(kind):
    rng = np.random.default_rng(SEED)
    return sum(len(alarms(ordinary_series(rng, 730, **kind))) for _ in range(YEARS // 2))


def power(kind, loss, after=(130, 140)):
    """Shares of planted losses found in the first night and within three, after so many nights."""
    rng, first, third = np.random.default_rng(SEED + 1), 0, 0
    for _ in range(TRIALS):
        night = int(rng.integers(*after))
        found = alarms(slowed(ordinary_series(rng, night + 3, **kind), night, loss), night)
        first += night in found
        third += bool(found)
    return first / TRIALS, third / TRIALS


def planted_series(number, kind):
    """Series, and the night and size of the loss in every second of them."""
    rng = np.random.default_rng(SEED + 2)
    for index in range(number):
        runs, night = ordinary_series(rng, NIGHTS, **kind), None
        if index % 2:
            night = int(rng.integers(*PLANTED))
            runs = slowed(runs, night, float(rng.choice(LOSSES)))
        yield runs, night


def real_series(number):
    """The same from real probes, with a loss in every second series."""
    rng = np.random.default_rng(SEED + 3)
    for index in range(number):
        for rates in json.loads(REAL.read_text()).values():
            turned, night = np.roll(rates, rng.integers(len(rates)), axis=0), None
            runs = [
                RunMetrics(run_id=str(place), host="a", throughput=run, baseline_throughput=control)
                for place, (run, control) in enumerate(turned)
            ]
            if index % 2:
                night = int(rng.integers(len(runs) // 2, len(runs) - 8))
                runs = slowed(runs, night, float(rng.choice(LOSSES)))
            yield runs, night


def f1(found, nights):
    """An alarm within 3 or 7 nights of the loss is right, a later one is neither, any without a loss is wrong."""
    texts = []
    for limit in IN_TIME:
        right = wrong = missed = 0
        for alarmed, night in zip(found, nights, strict=True):
            wrong += sum(night is None or one < night for one in alarmed)
            in_time = night is not None and any(night <= one < night + limit for one in alarmed)
            right, missed = right + in_time, missed + (night is not None and not in_time)
        score = 2 * right / (2 * right + wrong + missed)
        texts.append(f"within {limit} nights F1 {score:.3f} ({right} right, {wrong} wrong, {missed} missed)")
    return "; ".join(texts)


def against_otava(python, name, planted):
    series, nights = zip(*planted, strict=True)
    print(f"{name}, Paceline: {f1([alarms(runs) for runs in series], nights)}", flush=True)
    values = {
        "ratio": [[run.throughput / run.baseline_throughput for run in runs] for runs in series],
        "raw throughput": [[run.throughput for run in runs] for runs in series],
    }
    for what, rows in values.items():
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            Path(file.name).write_text(json.dumps({"series": rows, "magnitudes": MAGNITUDES}))
            peer = Path(__file__).with_name("peers") / "by_otava.py"
            done = subprocess.run([python, peer, file.name], capture_output=True, text=True, check=True)
        for least, found in json.loads(done.stdout).items():
            print(f"{name}, Otava, {what}, least magnitude {least}: {f1(found, nights)}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        for name in ("normal 1 %", "normal 1.5 %", "normal 1 %, ratio of hosts 2 %"):
            against_otava(sys.argv[1], name, planted_series(40, KINDS[name]))
        against_otava(sys.argv[1], "real probes", real_series(20))
    for name, kind in KINDS.items():
        (tenth, _), (_, twentieth), (_, early) = power(kind, 0.1), power(kind, 0.05), power(kind, 0.05, (50, 60))
        print(
            f"{name}: {false_alarms(kind)} false alarms in {YEARS} years; 10 % in the first night {tenth:.2f}, "
            f"5 % within three {twentieth:.2f}, after 50 nights {early:.2f}",
            flush=True,
        )
