"""Coverage of the factor card's intervals: python -m tests.benchmarks.simulate_factors; about one minute on one core.

Games of three factors with interactions, and of five with compilation and devices; for each kind of noise between
blocks, the share of 95 % intervals that cover the planted share, the worst factor and the interaction.
"""

import math

import numpy as np

from paceline.tasks.speedup.factor_card import factor_card
from tests.support.ladders import Game
from tests.support.reports import CANDIDATE

TRIALS = 1000
SEED = 25
SINGLES = {"loading": 1.3, "layout": 1.1, "precision": 0.7}
PAIRS = {("layout", "precision"): 2.0, ("loading", "precision"): 1.2}
GAMES = {
    "three factors": Game(CANDIDATE, SINGLES, PAIRS),
    "no effect": Game(CANDIDATE, dict.fromkeys(SINGLES, 1.0)),
    "five factors": Game(
        CANDIDATE.model_copy(update={"num_devices": 2, "compile": "step"}),
        SINGLES | {"compile": 1.5, "devices": 1.8},
        PAIRS,
    ),
}
ROUNDS = (8, 24)


def noise(kind, rng):
    """Draws of the log of a block's time."""
    state = 0.0
    while True:
        if kind == "normal 2 %":
            yield 0.02 * rng.standard_normal()
        elif kind == "t 2 %":
            yield 0.02 * rng.standard_t(3)
        elif kind == "lognormal":
            yield 0.02 * math.exp(rng.standard_normal())
        elif kind == "autocorrelated":
            state = 0.5 * state + 0.02 * rng.standard_normal()
            yield state
        else:  # bursts over neighbouring blocks
            state = state - 1 if state > 0 else float(rng.integers(1, 6)) * (rng.random() < 0.05)
            yield 0.3 * (state > 0) + 0.01 * rng.standard_normal()


def main():
    print(f"{'game':<14} {'noise':<15} {'rounds':>6}  {'worst factor':>12}  {'interaction':>11}")
    for title, game in GAMES.items():
        truth = {one.factor: one.ratio for one in factor_card(game.probe()).factors if one.ratio is not None}
        together = factor_card(game.probe()).interaction
        for kind in ("normal 2 %", "t 2 %", "lognormal", "autocorrelated", "bursts"):
            for rounds in ROUNDS:
                rng = np.random.default_rng(SEED)
                draws = noise(kind, rng)
                covered = dict.fromkeys([*truth, ""], 0)
                for _ in range(TRIALS):
                    card = factor_card(game.probe(noise=draws.__next__, num_rounds=rounds))
                    for one in card.factors:
                        if one.factor in truth:
                            covered[one.factor] += one.low <= truth[one.factor] <= one.high
                    covered[""] += card.interaction_low <= together <= card.interaction_high
                worst = min(covered[name] for name in truth) / TRIALS
                print(f"{title:<14} {kind:<15} {rounds:>6}  {worst:>12.3f}  {covered[''] / TRIALS:>11.3f}", flush=True)


if __name__ == "__main__":
    main()
