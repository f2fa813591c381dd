"""Twenty forecasts of two devices: python -m tests.benchmarks.forecasts RESULTS [COUNT].

Stores all forecasts of `paceline advise` first, and then measures each by `paceline run` on two devices. RESULTS is a
folder: every forecast and every measurement is a line of a file in it, so that an interrupted benchmark resumes; the
table is printed at the end. It needs a quiet machine of two cores and takes about half an hour.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from paceline.tasks.speedup.forecast.records import Prediction, calibration, check
from tests.benchmarks.stored_lines import add_line, read_lines

WORKLOADS = [(64, 16), (128, 16), (128, 32), (256, 16), (256, 32)]
"""Batch size and width of the network."""
WORKLOADS_IN_FP32 = [(32, 16), (64, 8), (64, 32), (128, 8), (256, 8)]
"""Further ones, in place of bf16 where the processor has no instructions for it: a step takes seconds there."""
SCALINGS = ("strong", "weak")
SECONDS = "speedup.max_seconds=35"  # of each probe: with the default of 25 few rounds of a profile's arms fit into it
SHORT = ("recipe.num_epochs=1", "speedup.competent_loop=false", "speedup.starts=0")
"""Of the measured runs, whose efficiency the probe shows before the training."""
PLAIN = ("execution.memory_format=channels_last", "execution.compile=off", "execution.loading=resident")


def paceline(folder, *arguments):
    """The JSON that a command prints."""
    program = str(Path(sys.executable).with_name("paceline"))
    environment = os.environ | {"PACELINE_HOME": str(folder / "home"), "PREFECT_LOGGING_LEVEL": "WARNING"}
    done = subprocess.run(
        [program, *arguments, "--json"], env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=900
    )
    return json.loads(done.stdout.splitlines()[-1])


def settings_of(batch, width, precision):
    return [f"recipe.batch_size={batch}", f"model.width={width}", f"execution.precision={precision}", *PLAIN, SECONDS]


def forecasts_of(folder, batch, width, precision):
    """The forecasts of two devices by scaling; one profile gives both."""
    result = paceline(folder, "advise", "digits", "--devices", "2", *settings_of(batch, width, precision))
    fields = Prediction.model_fields
    return {
        prediction["scaling"]: {name: value for name, value in prediction.items() if name in fields}
        for prediction in result["predictions"]
    }


def measured_speedup(folder, batch, width, precision, scaling):
    """The speedup of two devices over one, and its interval; None on a contaminated machine."""
    more = ["execution.num_devices=2", f"recipe.batch_scaling={scaling}"]
    speedup = paceline(folder, "run", "digits", *more, *SHORT, *settings_of(batch, width, precision))["speedup"]
    if speedup["efficiency"] is None or speedup["contaminated"]:
        return None
    return {name: 2 * speedup[name] for name in ("efficiency", "efficiency_low", "efficiency_high") if name in speedup}


def stored(path):
    return {tuple(line["key"]): line["value"] for line in read_lines(path)}


def store(path, key, value):
    add_line(path, {"key": key, "value": value, "time": time.time()})
    print(*key, value, flush=True)


def main(folder, count=20):
    folder.mkdir(parents=True, exist_ok=True)
    forecasts, measurements = folder / "forecasts.jsonl", folder / "measurements.jsonl"
    profiles = [(workload, "32-true") for workload in WORKLOADS]
    if {"avx512_bf16", "amx_bf16"} & set(Path("/proc/cpuinfo").read_text().split()):
        profiles += [(workload, "bf16-mixed") for workload in WORKLOADS]
    else:
        profiles += [(workload, "32-true") for workload in WORKLOADS_IN_FP32]
    profiles = profiles[: -(-count // len(SCALINGS))]
    for (batch, width), precision in profiles:
        if (batch, width, precision, "strong") not in stored(forecasts):
            for scaling, prediction in forecasts_of(folder, batch, width, precision).items():
                store(forecasts, (batch, width, precision, scaling), prediction)
    for key in stored(forecasts):
        if stored(measurements).get(key) is None:
            store(measurements, key, measured_speedup(folder, *key))
    print_table(stored(forecasts), {key: value for key, value in stored(measurements).items() if value})


def print_table(forecasts, measurements):
    checks = []
    print("batch width  precision  scaling  forecast             measured   error  inside")
    for key, measured in measurements.items():
        checks.append(check(Prediction(**forecasts[key]), "", "", measured["efficiency"], 0.0))
        one, (batch, width, precision, scaling) = checks[-1], key
        forecast = f"{one.predicted:.3f} [{one.low:.3f}, {one.high:.3f}]"
        inside = "yes" if one.inside else "no"
        row = f"{batch:>5} {width:>5}  {precision:<10} {scaling:<7}  {forecast:<22} {one.measured:.3f}"
        print(f"{row}  {one.error:>+6.1%}  {inside}")
    print(calibration(checks))
    print(f"median absolute error {median(abs(one.error) for one in checks):.1%}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), int(sys.argv[2]) if len(sys.argv) > 2 else 20)
