import numpy as np
import pytest

from paceline.tasks.measure.paired_ratio import planned_looks, speedup_ratio
from paceline.tasks.measure.warm_up import num_warm_up
from paceline.tasks.records.measurement import Block
from tests.support.noise import NOISE
from tests.support.simulated_machine import Machine


def rounds_of(logs, ratio=1.0):
    """Rounds from the logarithms of times, rounds x arms, in the order A B | B A."""
    arms = ("baseline", "candidate")
    return [
        tuple(
            Block(arm=arm, seconds_per_sample=float(np.exp(log)) * (ratio if arm == "baseline" else 1), num_steps=1)
            for arm, log in list(zip(arms, pair, strict=True))[:: -1 if number % 2 else 1]
        )
        for number, pair in enumerate(logs)
    ]


@pytest.mark.parametrize("num_slow", [2, 4, 6])
@pytest.mark.parametrize("num_rounds", [10, 16, 24])
def test_slow_rounds_at_the_start_are_dropped(num_slow, num_rounds):
    rng, found = np.random.default_rng(1), []
    for _ in range(100):
        logs = rng.normal(0, 0.02, (num_rounds, 2))
        logs[:num_slow] += [0.22, 0.14]
        found.append(num_warm_up(rounds_of(logs)))
    assert found.count(num_slow) >= 95


def test_steady_rounds_are_not_dropped():
    """1 % of the machines without any warm-up, by the level of the test; and never those that become slower."""
    rng = np.random.default_rng(2)
    dropped = sum(num_warm_up(rounds_of(rng.normal(0, 0.02, (16, 2)))) > 0 for _ in range(500))
    assert dropped <= 12
    assert num_warm_up(rounds_of(rng.normal(0, 0.001, (16, 2)) + np.repeat([0, 0.2], 8)[:, None])) == 0
    assert num_warm_up(rounds_of(np.zeros((8, 2)))) == 0


def test_neighbouring_rounds_that_are_alike_are_seldom_dropped():
    """On a shared machine the time of all arms wanders; 17 of 300 here, and 48 if its rounds counted as independent."""
    rng, dropped = np.random.default_rng(5), 0
    for _ in range(300):
        wandering = [rng.normal(0, 0.15)]
        while len(wandering) < 24:
            wandering.append(0.6 * wandering[-1] + rng.normal(0, 0.12))
        dropped += num_warm_up(rounds_of(np.array(wandering)[:, None] + rng.normal(0, 0.03, (24, 2)))) > 0
    assert dropped <= 30


def test_a_steady_drift_needs_no_trimming_and_keeps_its_rounds():
    rng = np.random.default_rng(3)
    drift = np.linspace(0.3, 0, 24)[:, None]
    dropped = sum(num_warm_up(rounds_of(rng.normal(0, 0.015, (24, 2)) + drift)) > 0 for _ in range(100))
    assert dropped <= 2


@pytest.mark.parametrize("kind", NOISE)
def test_the_decision_does_not_depend_on_the_ratio(kind):
    """The arms of a round swap their noise, or one arm is ten times as slow: the same rounds are dropped."""
    rng = np.random.default_rng(4)
    for _ in range(20):
        logs = NOISE[kind](rng, (1, 32)).reshape(16, 2)
        logs[:4] += 0.05
        swapped = np.where(rng.random((16, 1)) < 0.5, logs, logs[:, ::-1])
        assert num_warm_up(rounds_of(logs)) == num_warm_up(rounds_of(swapped)) == num_warm_up(rounds_of(logs, 10.0))


def test_a_probe_leaves_out_its_warm_up_in_both_arms_and_records_it():
    machine = Machine({"baseline": 0.3, "candidate": 0.3})
    machine.left |= {"baseline": [0.3 * 1.25] * 8, "candidate": [0.3 * 1.15] * 8}  # two before the first round
    result = machine.probe(steps_per_block=1)
    assert (len(result.warm_up), result.stopped_because) == (6, "interval narrow enough")
    assert [block.arm for block in result.rounds[0]] == ["baseline", "candidate"]
    assert len(result.rounds) == planned_looks(24)[0]
    assert speedup_ratio(result.rounds).value == pytest.approx(1.0)
    assert speedup_ratio(result.warm_up).value == pytest.approx(1.25 / 1.15)
