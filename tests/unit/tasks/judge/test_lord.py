"""The levels of a ledger: by hand, and over many ledgers of simulated candidates."""

import numpy as np
import pytest
from scipy.special import erfinv

from paceline.tasks.judge.lord import FALSE_KEEP_RATE, next_level, weight

ONE, TWO, THREE, FOUR = 0.437490, 0.144318, 0.075435, 0.047607
"""Weights by hand: j^-1.6 over zeta(1.6) = 2.285766."""


@pytest.mark.parametrize(
    ("kept", "level"),
    [
        ("", 0.025 * ONE),
        ("0", 0.025 * TWO),
        ("01", 0.025 * THREE + 0.025 * ONE),
        ("011", 0.025 * FOUR + 0.025 * TWO + 0.05 * ONE),
        ("1", 0.025 * TWO + 0.025 * ONE),
        ("111", 0.025 * FOUR + 0.025 * THREE + 0.05 * (TWO + ONE)),
    ],
)
def test_levels_by_hand(kept, level):
    assert next_level([each == "1" for each in kept]) == pytest.approx(level, rel=1e-4)


def test_no_more_than_the_wealth_is_spent():
    assert 0.999 < sum(weight(age) for age in range(1, 200_000)) < 1
    assert sum(next_level([False] * number) for number in range(2000)) < FALSE_KEEP_RATE / 2
    assert next_level([True] * 2000) < FALSE_KEEP_RATE


@pytest.mark.parametrize("effect", [2.0, 3.0, 5.0])
def test_false_keeps_of_200_candidates_of_which_half_are_equal(effect):
    generator = np.random.default_rng(7)
    shares, false, all_kept = [], 0, 0
    for _ in range(200):
        is_equal = generator.permutation(np.arange(200) < 100)
        scores = generator.normal(np.where(is_equal, 0.0, effect))
        kept = []
        for score in scores:
            level = next_level(kept)
            kept.append(bool(score > -np.sqrt(2) * erfinv(2 * level - 1)))
        wrong = np.sum(kept & is_equal)
        shares.append(wrong / max(1, np.sum(kept)))
        false, all_kept = false + wrong, all_kept + np.sum(kept)
    assert np.mean(shares) <= FALSE_KEEP_RATE
    assert false / all_kept <= FALSE_KEEP_RATE
    assert all_kept > (200 * 95 if effect == 5.0 else 200)
