"""The shares of planted factors, with and without the arms of a ladder."""

import itertools
import math

import numpy as np
import pytest

from paceline.tasks.records.execution import BASELINE, LADDER_PREFIX, differing_factors, ladder_arms
from paceline.tasks.records.measurement import AutotuneResult
from paceline.tasks.speedup.factor_card import factor_card
from paceline.tasks.speedup.verdict import speedup_result
from tests.support.ladders import Game
from tests.support.reports import CANDIDATE, make_probe, make_train

SINGLES = {"loading": 1.3, "layout": 1.1, "precision": 0.7}
PAIRS = {("layout", "precision"): 2.0, ("loading", "precision"): 1.2}
TWO = CANDIDATE.model_copy(update={"num_devices": 2, "compile": "step"})


def shapley(game, factor):
    """The weighted mean over coalitions (Shapley 1953), not over orders."""
    others = [name for name in SINGLES if name != factor]
    total = 0.0
    for size in range(len(others) + 1):
        weight = math.factorial(size) * math.factorial(len(others) - size) / math.factorial(len(others) + 1)
        for coalition in itertools.combinations(others, size):
            total += weight * (game.log_speed({*coalition, factor}) - game.log_speed(coalition))
    return math.exp(total)


def test_shares_are_shapley_values_and_multiply_to_the_ratio():
    game = Game(CANDIDATE, SINGLES, PAIRS)
    card = factor_card(game.probe())
    assert card.method == "Shapley value over 6 orders"
    found = {one.factor: one.ratio for one in card.factors if one.basis == "mean over the orders"}
    assert found == pytest.approx({name: shapley(game, name) for name in SINGLES})
    assert math.prod(found.values()) == pytest.approx(math.exp(game.log_speed(SINGLES)))
    assert card.interaction == pytest.approx(2.0 * 1.2)
    assert [one.factor for one in card.factors] == ["loading", "layout", "precision", "threads", "compile", "devices"]
    assert {one.basis for one in card.factors if one.factor not in SINGLES} == {"unchanged"}


def test_compilation_and_devices_come_last_in_every_order():
    game = Game(TWO, SINGLES | {"compile": 1.5, "devices": 1.8}, PAIRS)
    card = factor_card(game.probe())
    found = {one.factor: one.ratio for one in card.factors if one.ratio is not None}
    assert found == pytest.approx({name: shapley(game, name) for name in SINGLES} | {"compile": 1.5, "devices": 1.8})
    arms = ladder_arms(BASELINE, TWO)
    assert len(arms) == 8
    assert arms[LADDER_PREFIX + "loading+layout+precision+compile"].num_devices == 1
    assert sum(arm.compile != "off" for arm in arms.values()) == 1, "compiling takes long"
    assert all(arm.num_devices == 1 for arm in arms.values())


def test_an_execution_that_differs_in_one_factor_needs_no_ladder():
    bf16 = BASELINE.model_copy(update={"precision": "bf16-mixed"})
    assert (differing_factors(BASELINE, bf16), ladder_arms(BASELINE, bf16)) == (("precision",), {})
    card = factor_card(make_probe(1.5, candidate=bf16))
    (changed,) = [one for one in card.factors if one.basis != "unchanged"]
    assert (changed.factor, changed.basis) == ("precision", "added alone")
    assert changed.low < changed.ratio < changed.high
    assert card.method == "one at a time"


def test_without_a_ladder_only_what_was_measured_singly_has_a_share():
    game = Game(TWO, SINGLES | {"compile": 1.5, "devices": 1.8}, PAIRS)
    free = {
        "single": TWO.model_copy(update={"num_devices": 1}),
        "uncompiled": TWO.model_copy(update={"compile": "off"}),
    }
    card = factor_card(game.probe(free))
    found = {one.factor: (one.ratio, one.basis) for one in card.factors if one.basis != "unchanged"}
    assert found["devices"] == (pytest.approx(1.8), "added last")
    assert found["compile"] == (pytest.approx(1.5), "added last")
    assert {found[name] for name in SINGLES} == {(None, "not measured")}
    assert (card.method, card.interaction) == ("one at a time", None)


def test_a_missing_or_diverged_arm_makes_it_one_factor_at_a_time():
    probe = Game(CANDIDATE, SINGLES, PAIRS).probe()
    card = factor_card(probe.model_copy(update={"diverged": (LADDER_PREFIX + "layout+precision",)}))
    assert card.method == "one at a time"
    found = {one.factor: (one.ratio, one.basis) for one in card.factors if one.factor in SINGLES}
    assert found == {name: (pytest.approx(gain), "added alone") for name, gain in SINGLES.items()}


def test_a_xeon_whose_bf16_is_slow_gets_no_credit_for_bf16():
    """The verdict was: bf16 arithmetic, the channels-last layout and resident loading pay, at 1.04, bf16 being 0.68."""
    probe = make_probe(1.04, noise=0.002)
    layers = CANDIDATE.model_copy(update={"variant": "synthetic_input", "loading": "foreground"})
    timed = make_probe(1 / 1.47, candidate=layers, baseline=layers.model_copy(update={"precision": "32-true"}))
    train = make_train(None, search=AutotuneResult(probes=(timed,), budget_seconds=2.0, seconds=2.0))
    result = speedup_result(probe, train)
    assert result.significant_within_process
    assert "pay" not in result.verdict
    assert "measured singly: bf16 arithmetic 0.68 [0.67, 0.69] x" in result.verdict
    assert "not measured singly: resident loading and the channels-last layout;" in result.verdict
    (precision,) = [one for one in result.factors.factors if one.factor == "precision"]
    assert (precision.basis, precision.ratio) == ("in the search", pytest.approx(0.68, abs=0.01))
    assert type(result).model_validate_json(result.model_dump_json()) == result


def test_a_sentence_names_the_share_of_every_factor_of_a_ladder():
    verdict = speedup_result(Game(CANDIDATE, SINGLES, PAIRS).probe(), make_train(None)).verdict
    assert "Shapley values: resident loading 1.42 [1.42, 1.42] x" in verdict
    assert "singly" not in verdict


def test_intervals_of_shares_cover():
    """Arms with unequal noise; `tests/benchmarks/simulate_factors.py` has more kinds."""
    game = Game(CANDIDATE, SINGLES, PAIRS)
    truth = {name: shapley(game, name) for name in SINGLES} | {"": 2.4}
    missed = dict.fromkeys(truth, 0)
    for seed in range(100):
        rng = np.random.default_rng(seed)
        card = factor_card(game.probe(noise=lambda rng=rng: 0.02 * rng.standard_t(3)))
        for one in card.factors[:3]:
            missed[one.factor] += not one.low <= truth[one.factor] <= one.high
        missed[""] += not card.interaction_low <= truth[""] <= card.interaction_high
    assert max(missed.values()) <= 7
