import numpy as np
import pytest

from paceline.tasks.measure.carry_over import CarryOver, allow_for, carry_over
from paceline.tasks.measure.paired_ratio import Interval, speedup_ratio
from tests.support.noise import NOISE
from tests.unit.tasks.measure.test_warm_up import rounds_of


def found(rounds):
    return carry_over(rounds, "baseline", "candidate")


def test_what_an_arm_takes_more_after_the_other_is_found():
    logs = np.random.default_rng(1).normal(0, 0.003, (16, 2)) + np.linspace(0, 0.2, 16)[:, None]
    logs[1::2, 0] += 0.04  # the baseline, where it runs second
    effect, ratio = found(rounds_of(logs)), speedup_ratio(rounds_of(logs))
    assert effect.bias == pytest.approx(0.02, abs=0.005)
    assert effect.significant
    assert ratio.value == pytest.approx(1.02, abs=0.01)
    wide = allow_for(ratio, effect)
    assert (wide.value, wide.high) == (ratio.value, ratio.high)
    assert wide.low == pytest.approx(ratio.low / (1 + effect.bias))
    assert wide.low < 1


def test_an_extra_time_of_both_arms_alike_shifts_nothing():
    logs = np.random.default_rng(2).normal(0, 0.003, (16, 2))
    logs[1::2, 0] += 0.04
    logs[::2, 1] += 0.04
    assert not found(rounds_of(logs)).significant


@pytest.mark.parametrize("kind", NOISE)
def test_equal_arms_rarely_seem_to_carry_over(kind):
    rng, number = np.random.default_rng(3), 400
    seen = sum(found(rounds_of(NOISE[kind](rng, (1, 32)).reshape(16, 2))).significant for _ in range(number))
    assert seen <= 0.075 * number


def test_too_few_rounds_or_one_order_show_nothing():
    assert found(rounds_of(np.zeros((5, 2)))) is None
    assert found(rounds_of(np.zeros((16, 2)))[::2]) is None
    assert found(rounds_of(np.zeros((16, 2)))).p_value == 1.0
    assert carry_over(rounds_of(np.zeros((16, 2))), "baseline", "single") is None


def test_an_interval_is_widened_by_a_significant_effect_alone():
    own = Interval(value=1.1, low=1.05, high=1.15)
    assert allow_for(own, None) == allow_for(own, CarryOver(0.03, 0.06)) == own
    assert allow_for(own, CarryOver(-0.03, 0.001)).high == pytest.approx(1.15 / 0.97)
    none = Interval(value=1.1)
    assert allow_for(none, CarryOver(0.03, 0.001)) == none
