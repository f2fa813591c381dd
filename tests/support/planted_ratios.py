"""Arms whose throughputs have a known ratio, under noise as machines have it; on a clock that sleeps or only counts."""

import time
from dataclasses import dataclass, field

import numpy as np

from paceline.tasks.measure.probe import ArmRunner
from paceline.tasks.records.execution import BASELINE

RATIOS = (0.90, 0.98, 1.00, 1.02, 1.10)
KINDS = ("plain", "skew", "unequal", "drift", "neighbour")
CANDIDATE = BASELINE.model_copy(update={"memory_format": "channels_last"})
STEP_SECONDS = 0.01  # of the candidate
STEP_SD = 0.02
SPIKE_SHARE, SPIKE = 0.05, 3.0  # of a skewed arm's steps take so many times as long
COMMON_SD, COMMON_LAG_SECONDS = 0.05, 0.5  # slow-down that the baseline feels with half the power of the candidate
DRIFT, DRIFT_SECONDS = 0.2, 10.0
BUSY_SECONDS, QUIET_SECONDS, BUSY = 0.7, 1.5, 1.5  # a neighbour's bursts, and what they do to both arms
SPIN_SECONDS = 3e-4  # a sleep ends late: the last moment is waited for in a loop


@dataclass
class CountingClock:
    """Time passes only where it is asked to."""

    now: float = 0.0

    def __call__(self):
        return self.now

    def wait(self, seconds):
        self.now += seconds


class SleepingClock:
    """The machine's clock."""

    def __call__(self):
        return time.perf_counter()

    def wait(self, seconds):
        end = time.perf_counter() + seconds
        time.sleep(max(0.0, seconds - SPIN_SECONDS))
        while time.perf_counter() < end:
            pass


@dataclass
class PlantedArms:
    """Two arms of one start; `process_sd` is what the start itself does to the logarithm of their ratio."""

    ratio: float
    kind: str
    seed: int
    process_sd: float = 0.0
    clock: CountingClock | SleepingClock = field(default_factory=CountingClock)

    def __post_init__(self):
        self.rng = np.random.default_rng(self.seed)
        self.own_ratio = self.ratio * np.exp(self.rng.normal(0, self.process_sd))
        self.started = self.clock()
        self.common, self.common_at = self.rng.normal(0, COMMON_SD), self.started
        self.busy, self.changes_at = False, self.started

    @property
    def truth(self):
        """Ratio of expected total times: a lognormal slow-down has the mean exp(sd^2 / 2)."""
        powers = (0.5, 1.0) if self.kind == "unequal" else (0.0, 0.0)
        slow, fast = (np.exp((power * COMMON_SD) ** 2 / 2) for power in powers)
        return self.ratio * slow / fast

    def runners(self):
        arms = {"baseline": BASELINE, "candidate": CANDIDATE}
        return {
            role: ArmRunner(arm, lambda number, role=role: self.steps(role, number), 1) for role, arm in arms.items()
        }

    def steps(self, role, number):
        seconds = []
        for _ in range(number):
            started = self.clock()
            self.clock.wait(self.step_seconds(role, started))
            seconds.append(self.clock() - started)
        return seconds

    def step_seconds(self, role, now):
        seconds = STEP_SECONDS * (self.own_ratio if role == "baseline" else 1.0)
        seconds *= np.exp(self.rng.normal(0, STEP_SD))
        if self.kind == "skew" and self.rng.random() < SPIKE_SHARE:
            seconds *= SPIKE
        elif self.kind == "drift":
            seconds *= 1 + DRIFT * min(1.0, (now - self.started) / DRIFT_SECONDS)
        elif self.kind == "neighbour" and self.is_busy(now):
            seconds *= BUSY
        elif self.kind == "unequal":
            seconds *= np.exp((0.5 if role == "baseline" else 1.0) * self.slow_down(now))
        return seconds

    def slow_down(self, now):
        memory = np.exp(-(now - self.common_at) / COMMON_LAG_SECONDS)
        self.common = memory * self.common + self.rng.normal(0, COMMON_SD * np.sqrt(1 - memory**2))
        self.common_at = now
        return self.common

    def is_busy(self, now):
        while now >= self.changes_at:
            self.busy = not self.busy
            self.changes_at += self.rng.exponential(BUSY_SECONDS if self.busy else QUIET_SECONDS)
        return self.busy
