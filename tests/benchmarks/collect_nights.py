"""Real series of nights for `simulate_nights`: python -m tests.benchmarks.collect_nights FILE NUMBER.

Each night is a forked process that probes three pairs of training steps, with the schedule and the estimate of the
probe. Times are those of the process's CPU, so that a machine with other work gives series too: memory, caches and
clocks of its neighbours are in them, waiting for a core is not. Steps per CPU second: [run, control].
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

from paceline.conf.config import Speedup
from paceline.tasks.measure.probe import ArmRunner, run_probe
from paceline.tasks.records.execution import BASELINE

SECONDS = 0.7  # CPU time of one probe


def night():
    """The rates of a night."""
    torch.set_num_threads(1)

    def step(channels, layout, compute=None):
        network = nn.Sequential(nn.Conv2d(3, channels, 3), nn.ReLU(), nn.Conv2d(channels, channels, 3), nn.ReLU()).to(
            memory_format=layout
        )
        images = torch.randn(16, 3, 16, 16).to(memory_format=layout)

        def run(number):
            times = []
            for _ in range(number):
                started = time.process_time()
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=compute is not None):
                    network(images).square().mean().backward()
                times.append(time.process_time() - started)
            return times

        return run

    plain, last = torch.contiguous_format, torch.channels_last
    pairs = {
        "channels last": (step(16, last), step(16, plain)),
        "half the channels": (step(8, plain), step(16, plain)),
        "bf16": (step(32, last, torch.bfloat16), step(32, plain)),
    }
    settings = Speedup(num_blocks=24, max_seconds=SECONDS, target_half_width=0.005)
    rates = {}
    for name, arms in pairs.items():
        runners = {role: ArmRunner(BASELINE, arm, 1) for role, arm in zip(("candidate", "baseline"), arms, strict=True)}
        probe = run_probe(runners, settings, clock=time.process_time)
        rates[name] = [round(1 / probe.seconds_per_sample(role), 2) for role in runners]
    return rates


def in_a_process(work):
    """What a forked process returns."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, json.dumps(work()).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return json.loads(text)


if __name__ == "__main__":
    series = {}
    for _ in range(int(sys.argv[2])):
        for name, rates in in_a_process(night).items():
            series.setdefault(name, []).append(rates)
        Path(sys.argv[1]).write_text(json.dumps(series))
