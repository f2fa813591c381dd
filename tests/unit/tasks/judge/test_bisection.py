"""The search on simulated machines: one slow commit among 16, neighbours, commits that do not work, short budgets."""

import random
from types import SimpleNamespace

import numpy as np
import pytest

from paceline.tasks.errors import InputError
from paceline.tasks.judge.bisection import LEVEL, Search
from paceline.tasks.judge.records import Commit, ProcessRun, Question, Side
from paceline.tasks.records.measurement import Validity
from tests.support.refusals import refused

QUIET, BUSY = Validity(), Validity(contaminated=True, reasons=("2.00 cores busy with other processes",))
NUM_COMMITS = 16


class Machine:
    """Commits of a program of about a second; it drifts, has bursts, and a neighbour in a part of the time."""

    def __init__(self, seed, slowdowns, noise=0.02, broken=(), neighbour=(np.inf, np.inf), slower=2.0):
        self.seed, self.generator, self.noise, self.broken = seed, np.random.default_rng(seed), noise, broken
        self.slowdowns, self.neighbour, self.slower = slowdowns, neighbour, slower
        self.now, self.state = 0.0, 0.0

    @property
    def is_busy(self):
        return self.neighbour[0] <= self.now < self.neighbour[1]

    def run(self, side, question):
        number = int(side.command)
        if number in self.broken:
            raise InputError(f"--{side.name} {side.label}: it ended with status 1")
        self.state = 0.6 * self.state + self.noise * self.generator.normal()
        seconds = np.exp(self.state + (0.3 if self.generator.random() < 0.01 else 0.0) + 1e-5 * self.now)
        seconds *= np.prod([1 + gain for at, gain in self.slowdowns.items() if number >= at])
        seconds *= self.slower * np.exp(0.05 * self.generator.normal()) if self.is_busy else 1.0
        self.now += seconds
        return ProcessRun(seconds=seconds)

    def search(self, recorded=None, num_commits=NUM_COMMITS, budget_seconds=3600.0):
        def open_side(name, commit):
            return Side(name=name, command=commit, directory="/", revision=f"v{commit}")

        commits = [Commit(name=str(number), subject="Change") for number in range(num_commits + 1)]
        sides = {"old": open_side("good", "0"), "new": open_side("bad", str(num_commits))}
        question = Question(**sides, budget_seconds=budget_seconds, limit_seconds=60.0)

        def watch(pids):
            started = self.is_busy
            return SimpleNamespace(stop=lambda: BUSY if started or self.is_busy else QUIET)

        self.notes = []
        options = {"run": self.run, "watch": watch, "draw": random.Random(self.seed), "clock": lambda: self.now}
        return Search(question, commits, open_side, recorded, self.notes.append, **options).search()


def names(found):
    return [int(commit.name) for commit in found.commits]


def test_one_slow_commit_among_16_is_found():
    outcomes = []
    for seed in range(100):
        slow = 1 + seed % NUM_COMMITS
        found = Machine(seed, {slow: 0.08}).search()
        outcomes.append((found.outcome, names(found)) == ("FOUND", [slow]))
        if found.outcome == "FOUND":
            assert found.ratio.high < 1
            assert found.series[-1].verdict == "slower"
    assert sum(outcomes) >= 95


def test_all_series_share_the_level():
    machine = Machine(1, {11: 0.3})
    found = machine.search()
    steps = [each.verdict for each in found.series]
    assert (steps[0], steps[-1], len(steps)) == ("slower", "slower", 6), "1 + log2(16) + 1 series"
    assert {len(each.runs) for each in found.series[1].rounds} == {6}
    assert len(machine.notes) == 6
    looks = -np.log2(LEVEL / 6 / 10)
    assert all(len(each.rounds) >= looks for each in found.series), "fewer could not reach the level"


def test_equal_revisions_have_no_slowdown():
    outcomes = [Machine(seed, {}).search().outcome for seed in range(50)]
    assert outcomes.count("NO SLOWDOWN") >= 45
    assert outcomes.count("FOUND") == 0


def test_a_neighbour_that_is_there_now_as_it_was_then_is_the_machine():
    outcomes = [
        Machine(seed, {}, neighbour=(0.0, np.inf)).search((1.0, 2.0), budget_seconds=900).outcome for seed in range(50)
    ]
    assert outcomes.count("MACHINE") >= 48


def test_a_machine_that_has_become_slow_without_a_sign_is_the_machine():
    found = Machine(1, {0: 0.5}).search((1.0, 1.5))
    assert (found.outcome, found.series[0].verdict) == ("MACHINE", "equal")
    assert Machine(1, {}).search((1.0, 1.5)).outcome == "NO SLOWDOWN", "it is as fast as it was"


def test_a_neighbour_that_comes_and_stays_is_the_machine_and_the_range_is_right():
    found = Machine(2, {11: 0.08}, neighbour=(150.0, np.inf)).search(budget_seconds=900)
    assert found.outcome == "MACHINE"
    assert 11 in names(found)
    assert 1 < len(names(found)) < NUM_COMMITS, "the steps before have excluded some"


def test_a_neighbour_that_goes_again_delays_the_search_alone():
    found = Machine(2, {11: 0.08}, neighbour=(0.0, 120.0)).search()
    assert (found.outcome, names(found)) == ("FOUND", [11])
    assert any(each.contaminated for each in found.series[0].rounds)


def test_a_neighbour_does_not_excuse_the_code_where_it_is_known_to_be_slow():
    found = Machine(3, {11: 0.5}, neighbour=(0.0, np.inf), slower=1.1).search((1.0, 1.5), budget_seconds=900)
    assert (found.outcome, len(names(found))) == ("UNDECIDED", NUM_COMMITS)
    assert "contaminated" in found.reason


@pytest.mark.parametrize(
    ("broken", "outcome", "remaining"),
    [
        ({8, 9, 3}, "FOUND", [11]),
        ({10}, "UNDECIDED", [10, 11]),
        (set(range(1, NUM_COMMITS)), "UNDECIDED", list(range(1, NUM_COMMITS + 1))),
    ],
    ids=["others", "the one before", "all"],
)
def test_commits_at_which_the_command_fails_are_skipped(broken, outcome, remaining):
    found = Machine(4, {11: 0.08}, broken=broken).search()
    assert (found.outcome, names(found)) == (outcome, remaining)
    skipped = [each for each in found.series if each.verdict == "skipped"]
    assert len(skipped) >= 1
    assert all("status 1" in each.reason for each in skipped)


def test_a_revision_at_which_the_command_fails_is_refused():
    with refused("--good", "v0"):
        Machine(4, {11: 0.08}, broken={0}).search()


def test_of_two_slow_commits_one_is_found():
    found = Machine(5, {3: 0.06, 12: 0.06}).search()
    assert found.outcome == "FOUND"
    assert names(found) in ([3], [12])


def test_a_slowdown_by_all_commits_together_blames_none():
    found = Machine(6, {number: 0.008 for number in range(1, NUM_COMMITS + 1)}).search()
    assert (found.outcome, found.series[-1].verdict) == ("UNDECIDED", "equal")


def test_a_search_without_time_for_all_series_names_those_that_remain():
    found = Machine(7, {5: 0.04}, noise=0.05).search(budget_seconds=500.0)
    assert found.outcome == "UNDECIDED"
    assert 5 in names(found)
    assert len(names(found)) > 1


def test_neighbouring_revisions_need_no_search():
    found = Machine(8, {1: 0.08}).search(num_commits=1)
    assert (found.outcome, names(found), len(found.series)) == ("FOUND", [1], 1)


def test_a_budget_without_a_chance_is_refused_with_one_that_has_it():
    with refused("--budget", 100, 16) as caught:
        Machine(9, {5: 0.08}).search(budget_seconds=100.0)
    budget = float(caught.value.hint.split()[1])
    assert Machine(9, {5: 0.08}).search(budget_seconds=budget).outcome == "FOUND"
