"""Minimal sets of changes that make a program slower, on a simulated machine."""

import random
from types import SimpleNamespace

import numpy as np
import pytest

from paceline.tasks.judge.bisection import LEVEL, Search
from paceline.tasks.judge.minimal_set import Change, find_minimal_set
from paceline.tasks.judge.records import ProcessRun, Question, Side
from paceline.tasks.records.measurement import Validity

CHANGES = [Change(name=f"p{number}", good="1", bad="2") for number in range(12)]


class Machine:
    """A machine on which a program is slower with all changes of a set; `searches` are those that were started."""

    def __init__(self, needed, noise=0.02):
        self.needed, self.noise, self.now = set(needed), noise, 0.0
        self.generator, self.searches = np.random.default_rng(sum(needed)), []

    def run(self, side, question):
        changed = {int(word) for word in side.command.split()}
        seconds = float(np.exp(self.noise * self.generator.normal())) * (1.3 if self.needed <= changed else 1.0)
        self.now += seconds
        return ProcessRun(seconds=seconds)

    def start_search(self, *arguments, level):
        quiet = SimpleNamespace(stop=Validity)
        options = {"run": self.run, "watch": lambda pids: quiet, "draw": random.Random(1), "clock": lambda: self.now}
        self.searches.append(Search(*arguments, level=level, what="package", **options))
        return self.searches[-1]

    def find(self, budget=1e9):
        def open_side(name, changed):
            command = " ".join(change.name[1:] for change in changed)
            return Side(name=name, command=command, directory="/", revision=command)

        sides = {"old": open_side("good", ()), "new": open_side("bad", ())}
        question = Question(**sides, budget_seconds=budget, limit_seconds=60.0)
        return find_minimal_set(CHANGES, question, open_side, self.start_search)


@pytest.mark.parametrize("needed", [[0], [5], [11], [2, 9], [0, 1], [10, 11], [0, 5, 11]])
def test_a_minimal_set_is_found(needed):
    machine = Machine(needed)
    found = machine.find()
    assert found.outcome == "FOUND"
    assert sorted(int(commit.name[1:]) for commit in found.commits) == needed
    assert ("none of them can be left out" in found.reason) == (len(needed) > 1)
    assert all(f"p{number} 1 -> 2" in found.reason for number in needed)
    levels = [search.level for search in machine.searches]
    assert levels == [LEVEL / 2**number for number in range(1, len(levels) + 1)]
    assert len(levels) <= len(needed) + 1
    assert len(found.series) == sum(len(search._series) for search in machine.searches)
    assert found.seconds == pytest.approx(machine.now)
    assert found.num_commits == len(CHANGES)
    assert found.ratio.high < 1


def test_without_a_slowdown_nothing_is_found():
    found = Machine([99]).find()
    assert found.outcome == "NO SLOWDOWN"
    assert len(found.commits) == len(CHANGES)


def test_without_time_for_a_minimal_set_those_that_may_be_in_it_remain():
    whole = Machine([2, 9])
    whole.find()
    first, second, *_ = whole.searches
    assert first.question.budget_seconds - second.question.budget_seconds > 0
    found = Machine([2, 9]).find(budget=first.question.budget_seconds - second.question.budget_seconds + 1)
    assert found.outcome == "UNDECIDED"
    assert {commit.name for commit in found.commits} == {f"p{number}" for number in range(10)}
    assert "the set may not be minimal: --budget" in found.reason
