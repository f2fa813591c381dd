"""Ten planted limits of a training step, one of them twice, and what Paceline should name.

Sleeps stand for what takes time and no processor: input, exchange, the update, what ranks share, a slow rank. Tiny
steps, arithmetic, memory traffic and the neighbour are real. Heat is a count of throttling events that rises in a copy
of the kernel's files.
"""

import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from paceline.tasks.records.execution import BASELINE
from paceline.tasks.records.measurement import Measurement, MeasureResult
from paceline.tasks.speedup.verdict import speedup_result
from paceline.tasks.train.launch.coordinator import measure_group
from paceline.tasks.train.rank.benchmark import diagnostic_arms
from tests.support.jobs import planned_arm, planted

TWO = ("execution.num_devices=2",)
TINY = ("data.image_size=8", "model.width=1", "recipe.batch_size=8", "execution.loading=resident")
PLAIN = ("execution.precision=32-true", "execution.compile=off", "execution.memory_format=contiguous")
RUN = (*PLAIN, "execution.loading=resident", "recipe.num_epochs=1", "recipe.warmup_epochs=0.5")
HOG = "while True: pass"
NETWORKS = """
import torch
from torch import nn


class Traffic(nn.Module):
    def __init__(self, image_shape, num_classes, width, depth):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width, 1, 1))
        self.depth = depth
        self.classify = nn.Linear(width, num_classes)

    def forward(self, images):
        values = images.mean(1, keepdim=True) * self.scale
        for _ in range(self.depth):
            values = torch.relu(values)
        return self.classify(values.mean((2, 3)))


class Layers(nn.Sequential):
    def __init__(self, image_shape, num_classes, width, depth):
        sizes = [image_shape[0] * image_shape[1] * image_shape[2], *[2 * width] * depth]
        hidden = [part for pair in zip(sizes, sizes[1:]) for part in (nn.Linear(*pair), nn.ReLU())]
        super().__init__(nn.Flatten(), *hidden, nn.Linear(2 * width, num_classes))
"""


@dataclass(frozen=True)
class Limit:
    """A planted limit; measured in a group of ranks, or in a run where the device's own limits count."""

    bottleneck: str | None
    """Expected one; None for a disturbance, which makes the measurement contaminated."""
    overrides: tuple[str, ...] = ()
    plant: str | None = None
    reason: str = ""
    """Part of the verdict."""
    is_run: bool = False

    def is_named(self, result) -> bool:
        """Whether a result (its JSON) names it."""
        if self.bottleneck is None:
            return result["cause"] == "contaminated machine" and self.reason in result["verdict"]
        return result["bottleneck"] == self.bottleneck and self.reason in " ".join(result["diagnosis"])


LIMITS = {
    "slow input": Limit("data-bound", ("execution.loading=foreground",), "input=0.001"),
    "big exchange": Limit("communication-bound", TWO, "exchange=0.08"),
    "weight update": Limit("update-bound", (), "update=0.08"),
    "tiny steps": Limit("launch-bound", TINY),
    "arithmetic": Limit("compute-bound", ("data.image_size=28", "recipe.batch_size=256", *RUN), is_run=True),
    "memory traffic": Limit(
        "memory-bound",
        ("data.image_size=28", "recipe.batch_size=256", "model.name=traffic", "model.width=64", "model.depth=12", *RUN),
        is_run=True,
    ),
    "two wide layers": Limit(
        "compute-bound",
        ("recipe.batch_size=256", "model.name=layers", "model.width=1024", "model.depth=2", *RUN),
        is_run=True,
    ),
    "contention": Limit("contention", TWO, "contention=0.002"),
    "a neighbour": Limit(None, ("speedup.max_seconds=4",), reason="busy with other processes"),
    "heat": Limit(None, ("speedup.max_seconds=4",), reason="clocks were lowered (thermal)"),
    "a slow rank": Limit("slow rank", TWO, "rank-1=0.002", reason="wait for rank 1"),
}


def measure_limit(name, make_job, address, folder: Path):
    """Measure a planted limit in a group of ranks; the probe and the result."""
    limit = LIMITS[name]
    job = make_job("speedup.max_seconds=16", *limit.overrides)
    candidate = planned_arm(job)
    arms = {"baseline": BASELINE, "candidate": candidate}
    arms |= diagnostic_arms(candidate, job.config.recipe.batch_size // candidate.num_devices)
    surroundings = {"a neighbour": hog(1), "heat": heat(folder)}.get(name, nullcontext())
    more = {"HEAT": str(folder)} if name == "heat" else {}
    with surroundings, planted(address, limit.plant, **more):
        measuring = job.model_copy(update={"measurement": Measurement(arms=arms)})
        probe = measure_group(measuring, address, MeasureResult).probe
    return probe, speedup_result(probe)


@contextmanager
def hog(number):
    """Processes of somebody else, and no children of ours, that want all they can get."""
    start = f"for _ in $(seq {number}); do '{sys.executable}' -c '{HOG}' >/dev/null 2>&1 & echo $!; done"
    found = subprocess.run(["sh", "-c", start], capture_output=True, text=True, check=True, start_new_session=True)
    try:
        yield
    finally:
        for pid in found.stdout.split():
            os.kill(int(pid), signal.SIGKILL)


@contextmanager
def heat(folder):
    """Count a throttling event of the processor twenty times a second, in files like those of the kernel."""
    path = folder / "cpu0" / "thermal_throttle" / "package_throttle_count"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("0")
    ended = threading.Event()

    def count():
        number = 0
        while not ended.wait(0.05):
            number += 1
            new = path.with_suffix(".new")
            new.write_text(str(number))
            new.replace(path)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
