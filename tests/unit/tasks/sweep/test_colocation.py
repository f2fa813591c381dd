"""What is measured of models side by side, and what is read from it."""

import pytest

from paceline.conf.load import load
from paceline.tasks.records.measurement import Block, ProbeResult
from paceline.tasks.sweep.colocation import ALONE, BESIDE, TOGETHER, WHOLE, colocation_of, judge_colocation
from paceline.tasks.train.plan import resolve
from tests.support.studies import HARDWARE

TWO_CORES = HARDWARE.model_copy(update={"num_cores": 2})


def arms():
    plan = resolve(load("digits", ["execution.num_devices=2"]), TWO_CORES, 1293)
    return colocation_of(plan, 129, 2).arms


def test_four_ways_to_use_two_cores():
    found = arms()
    assert {role: (arm.num_devices, arm.batch_size, arm.variant, arm.num_threads) for role, arm in found.items()} == {
        ALONE: (1, 129, "full", None),
        BESIDE: (2, 129, "no_sync", None),
        TOGETHER: (2, 64, "full", None),
        WHOLE: (1, 129, "full", 2),
    }


def probe(seconds, num_rounds=8):
    """Rounds in which an arm takes so many seconds per sample."""
    found = arms()
    return ProbeResult(
        baseline=found.pop(ALONE),
        candidate=found.pop(BESIDE),
        others=found,
        batch_size=129,
        rounds=tuple(
            tuple(Block(arm=role, seconds_per_sample=each * (1 + number / 1000), num_steps=5) for role, each in seconds)
            for number in range(num_rounds)
        ),
        seconds=9.0,
        stopped_because="all blocks done",
    )


def test_ratios_are_of_samples_per_second():
    found = judge_colocation(probe([(ALONE, 1.0), (BESIDE, 0.5), (TOGETHER, 0.8), (WHOLE, 0.6)]))
    assert found.over_alone.value == pytest.approx(2.0)
    assert found.over_together.value == pytest.approx(1.6)
    assert found.over_whole.value == pytest.approx(1.2)
    assert found.over_best == found.over_whole
    assert found.layout == "one model per device"


def test_what_was_not_measured_is_unknown():
    assert judge_colocation(probe([(ALONE, 1.0), (BESIDE, 0.5)])) is None
    assert judge_colocation(probe([(ALONE, 1.0), (BESIDE, 0.5), (TOGETHER, 0.8)])).over_whole is None
