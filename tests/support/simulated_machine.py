"""A machine on which the arms of a probe take simulated time."""

import numpy as np

from paceline.conf.config import Speedup
from paceline.tasks.measure.probe import ArmRunner, run_probe
from paceline.tasks.records.execution import Arm

ARM = Arm(num_devices=1, precision="32-true", compile="off", memory_format="contiguous", loading="foreground")


class Machine:
    """Arms whose steps take simulated time."""

    def __init__(self, step_seconds, noise=lambda: 0.0, warmup=()):
        self.now, self.calls, self.noise = 0.0, [], noise
        self.left = {role: list(warmup) for role in step_seconds}
        self.runners = {role: self._runner(role, seconds) for role, seconds in step_seconds.items()}

    def _runner(self, role, seconds):
        def run(num_steps):
            self.calls.append((role, num_steps))
            steps = [
                (self.left[role].pop(0) if self.left[role] else seconds * np.exp(self.noise()))
                for _ in range(num_steps)
            ]
            self.now += sum(steps)
            return steps

        return ArmRunner(arm=ARM, run=run, samples_per_step=32)

    def probe(self, agree=lambda value: value, watch=None, **settings):
        return run_probe(self.runners, Speedup(**settings), agree=agree, watch=watch, clock=lambda: self.now)
