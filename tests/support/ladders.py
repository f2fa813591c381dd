"""A planted game of factors: what each is worth alone and with others, and the probe that would show it."""

from dataclasses import dataclass, field

import numpy as np

from paceline.tasks.records.execution import BASELINE, Arm, differing_factors, ladder_arms
from paceline.tasks.records.measurement import Block, ProbeResult

NUM_ROUNDS = 12
SECONDS = 1e-3


@dataclass(frozen=True)
class Game:
    candidate: Arm
    singles: dict[str, float]
    """Throughput with a factor alone over that of the baseline."""
    pairs: dict[tuple[str, str], float] = field(default_factory=dict)
    """What two factors multiply it by in addition where both are there."""

    def log_speed(self, factors) -> float:
        factors = set(factors)
        alone = sum(np.log(gain) for name, gain in self.singles.items() if name in factors)
        return float(alone + sum(np.log(gain) for pair, gain in self.pairs.items() if set(pair) <= factors))

    def probe(self, others=None, noise=lambda: 0.0, num_rounds=NUM_ROUNDS) -> ProbeResult:
        """A probe with these arms, or those of a ladder."""
        others = ladder_arms(BASELINE, self.candidate) if others is None else others
        arms = {"baseline": BASELINE, "candidate": self.candidate} | others
        seconds = {
            role: SECONDS / np.exp(self.log_speed(differing_factors(BASELINE, arm))) for role, arm in arms.items()
        }
        rounds = tuple(
            tuple(Block(arm=role, seconds_per_sample=seconds[role] * np.exp(noise()), num_steps=4) for role in arms)
            for _ in range(num_rounds)
        )
        return ProbeResult(
            baseline=BASELINE,
            candidate=self.candidate,
            batch_size=64,
            samples_per_step={role: 64 * arm.num_devices for role, arm in arms.items()},
            others=dict(others),
            rounds=rounds,
            seconds=1.0,
            stopped_because="all blocks done",
        )
