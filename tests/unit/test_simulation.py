"""Simulated histories of placement, ranks, leases, recovery, checkpoints and statuses, and what they can find."""

from types import SimpleNamespace

import pytest

from paceline.tasks.train.launch import rank_group
from tests.simulation import scale, shrink, world
from tests.simulation.patches import simulated
from tests.simulation.plants import PLANTS

NUM_BLOCKS, BLOCK = 10, 150  # with the rest about a minute of one core
WITH_HISTORY = (2075, 3156, 3801, 4318, 4669, 5678, 7715)
"""Seeds that have found defects, of the product or of the simulator."""
MAX_TRIES = 400


@pytest.mark.parametrize("block", range(NUM_BLOCKS))
def test_no_history_violates_an_invariant(block):
    with simulated():
        outcomes = [world.run(seed) for seed in range(block * BLOCK, (block + 1) * BLOCK)]
    assert {outcome.seed: outcome.violation for outcome in outcomes if outcome.violation} == {}
    assert any(len(outcome.faults) > 2 and outcome.num_attempts > 2 for outcome in outcomes), "no history was hard"


@pytest.mark.parametrize("seed", WITH_HISTORY)
def test_a_seed_that_once_found_a_defect_finds_none(seed):
    with simulated():
        assert world.run(seed).violation is None


def test_no_history_violates_an_invariant_where_ranks_are_started_in_parts(monkeypatch):
    monkeypatch.setattr(rank_group, "MAX_STARTS", 1)
    with simulated():
        outcomes = [world.run(seed) for seed in range(BLOCK)]
    assert {outcome.seed: outcome.violation for outcome in outcomes if outcome.violation} == {}


def test_a_start_and_a_restart_ask_each_host_once_and_each_rank_a_few_times(monkeypatch):
    monkeypatch.setattr(scale, "time", SimpleNamespace(process_time=lambda: 0.0))  # the same on every machine
    with simulated():
        few, many = (scale.simulate(num_ranks, "rank") for num_ranks in (16, 64))
    for few_messages, many_messages in zip(
        (few.start[2], few.restart[3]), (many.start[2], many.restart[3]), strict=True
    ):
        assert many_messages <= 8 * 64, "messages: four to claim and start each rank, and one for each host of eight"
        assert many_messages <= 4 * few_messages, "they do not grow faster than the ranks"
    assert many.restart[0] < many.restart[1], "all run again after the decision"


def run_planted(name, seed, chosen=None, **options):
    plant = PLANTS[name]
    with plant.planted():
        return world.run(seed, chosen, changes=plant.changes, kinds=plant.kinds or None, **options)


def first_violation(name, min_faults=0):
    """The first history that shows a planted defect."""
    outcomes = (run_planted(name, seed) for seed in range(MAX_TRIES))
    return next(outcome for outcome in outcomes if outcome.violation and len(outcome.faults) >= min_faults)


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_defect_is_found(name):
    with simulated():
        found = first_violation(name)
        assert shrink.kind_of(found.violation) in PLANTS[name].violations.split(", "), found.violation
        sound = world.run(found.seed, changes=PLANTS[name].changes, kinds=PLANTS[name].kinds or None)
    assert sound.faults == found.faults
    assert sound.violation is None


def test_a_seed_plays_the_same_history_again_and_is_shortened_to_the_faults_that_matter():
    name = "nothing is fenced"
    with simulated():
        failed = first_violation(name, min_faults=3)
        again = [run_planted(name, failed.seed, keep_trace=True) for _ in range(2)]
        assert again[0].trace == again[1].trace
        assert again[0].violation == failed.violation
        fewer = shrink.shorten(failed, lambda seed, chosen: run_planted(name, seed, chosen))
        kind = shrink.kind_of(failed.violation)
        assert shrink.kind_of(run_planted(name, failed.seed, fewer).violation) == kind
        assert 0 < len(fewer) < len(failed.faults)
        for fault in fewer:
            without = run_planted(name, failed.seed, [other for other in fewer if other is not fault]).violation
            assert without is None or shrink.kind_of(without) != kind, f"it happens without {fault}, too"
