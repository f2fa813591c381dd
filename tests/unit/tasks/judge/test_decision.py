"""The decision on simulated times: errors, power, quality, contaminated rounds and budgets."""

from types import SimpleNamespace

import numpy as np
import pytest

from paceline.tasks.judge.decision import decide, first_look, plan_looks
from paceline.tasks.judge.records import ProcessRun, Question, Side
from paceline.tasks.judge.rounds import judge_sides
from paceline.tasks.records.measurement import Validity
from tests.support.refusals import refused

QUIET, BUSY = Validity(), Validity(contaminated=True, reasons=("2.00 cores busy with other processes",))


class Machine:
    """Two programs of about a second, on a machine that drifts, has bursts, and is alike from process to process."""

    def __init__(self, seed, gain=1.0, noise=0.02, metrics=None, states=()):
        self.generator, self.gain, self.noise, self.now = np.random.default_rng(seed), gain, noise, 0.0
        self.metrics, self.states, self.slow = metrics or {}, iter(states), 0.0
        self.num_runs, self.looked_after = 0, []

    def run(self, side, question):
        self.num_runs += 1
        self.slow = 0.6 * self.slow + self.noise * self.generator.normal()
        burst = 0.3 if self.generator.random() < 0.03 else 0.0
        seconds = np.exp(self.slow + burst + 1e-4 * self.now) / (self.gain if side.name == "new" else 1.0)
        self.now += seconds
        metric = self.metrics.get(side.name)
        return ProcessRun(seconds=seconds, metric=metric and metric(self.generator))

    def judge(self, level=0.01, **options):
        sides = {name: Side(name=name, command=name, directory="/") for name in ("old", "new")}
        question = Question(**sides, **{"budget_seconds": 120.0, "limit_seconds": 60.0, **options})
        state = SimpleNamespace(stop=lambda: next(self.states, QUIET))
        coin = lambda: int(self.generator.integers(2))  # noqa: E731
        before_look = lambda: self.looked_after.append(self.num_runs)  # noqa: E731
        return judge_sides(question, level, before_look, self.run, lambda pids: state, coin, lambda: self.now)


def test_equal_sides_are_seldom_kept():
    outcomes = [Machine(seed).judge(level=0.05)[0].outcome for seed in range(200)]
    assert outcomes.count("KEEP") <= 10
    assert outcomes.count("DISCARD") <= 10


@pytest.mark.parametrize(("gain", "outcome"), [(1.05, "KEEP"), (1 / 1.05, "DISCARD")])
def test_a_difference_of_5_percent_is_found(gain, outcome):
    decisions = [Machine(seed, gain).judge()[0] for seed in range(100)]
    assert [each.outcome for each in decisions].count(outcome) >= 90
    assert sum(each.ratio.low <= gain <= each.ratio.high for each in decisions) >= 95


def test_a_clear_case_ends_early():
    machine = Machine(1, 1.5)
    decision, rounds = machine.judge(budget_seconds=1000)
    assert (decision.outcome, len(rounds)) == ("KEEP", first_look(0.01))
    assert machine.looked_after == [2 + 4 * first_look(0.01)], "the level is spent before the first look"


def test_a_level_is_spent_once_and_only_by_enough_rounds():
    machine = Machine(8, 1.0)
    assert len(machine.judge()[1]) > 2 * first_look(0.01)
    assert machine.looked_after == [2 + 4 * first_look(0.01)]
    machine = Machine(1, 1.5, states=[QUIET] * (first_look(0.01) - 1) + [BUSY] * 1000)
    decision, _ = machine.judge()
    assert (decision.outcome, decision.num_rounds) == ("RETEST", first_look(0.01) - 1)
    assert machine.looked_after == []


@pytest.mark.parametrize(
    ("old", "new", "outcome", "parity"),
    [
        (lambda _: 0.5, lambda _: 0.5, "KEEP", "on par"),
        (lambda _: 0.5, lambda _: 0.504, "KEEP", "on par"),
        (lambda _: 0.5, lambda _: 0.6, "KEEP", "better"),
        (lambda _: 0.5, lambda _: 0.4, "DISCARD", "worse"),
        (lambda random: random.normal(0.5, 0.001), lambda random: random.normal(0.5, 0.001), "KEEP", "on par"),
        (lambda random: random.normal(0.5, 0.01), lambda random: random.normal(0.507, 0.01), "KEEP", "not worse"),
        (lambda random: random.normal(0.5, 0.1), lambda random: random.normal(0.5, 0.1), "RETEST", "undecided"),
        (lambda random: random.normal(0.5, 0.01), lambda random: random.normal(0.4, 0.01), "DISCARD", "worse"),
    ],
    ids=[
        "equal",
        "within the margin",
        "better",
        "worse",
        "alike",
        "noisy and rather better",
        "noisy",
        "noisy and worse",
    ],
)
@pytest.mark.parametrize("sign", [1, -1], ids=["higher is better", "lower is better"])
def test_quality_is_shown_and_not_presumed(old, new, outcome, parity, sign):
    metrics = {"old": lambda random: sign * old(random), "new": lambda random: sign * new(random)}
    decision, _ = Machine(3, 1.3, metrics=metrics).judge(lower_is_better=sign < 0)
    assert (decision.outcome, decision.parity) == (outcome, parity), decision
    assert decision.margin == pytest.approx(0.005, rel=0.5)
    assert (decision.needed_rounds is None) == (outcome != "RETEST") or parity == "undecided"


def test_a_metric_is_on_par_only_where_a_gain_is_excluded_too():
    plan = plan_looks(0.01, 10)
    quality = np.array([*[-0.004] * 3, *[0.02] * 7])
    decisions = [decide(np.full(10, 0.1), quality, margin, plan) for margin in (0.003, 0.005, 0.02)]
    assert [(each.outcome, each.parity) for each in decisions] == [
        ("RETEST", "undecided"),
        ("KEEP", "not worse"),
        ("KEEP", "on par"),
    ]


def test_a_loss_of_quality_is_seldom_kept():
    """The planted loss is exactly the margin."""
    metrics = {"old": lambda random: random.normal(0.5, 0.01), "new": lambda random: random.normal(0.48, 0.01)}
    decisions = [Machine(seed, 1.3, metrics=metrics).judge(level=0.05, margin=0.02)[0] for seed in range(100)]
    assert [each.outcome for each in decisions].count("KEEP") <= 5


def test_an_undecided_case_names_what_would_decide_it():
    decision, rounds = Machine(8, 1.01).judge()
    assert decision.outcome == "RETEST"
    assert decision.needed_rounds > len(rounds)
    again, _ = Machine(8, 1.01).judge(budget_seconds=2 * decision.needed_seconds)
    assert again.outcome == "KEEP"


def test_contaminated_rounds_are_repeated_and_do_not_count():
    decision, rounds = Machine(1, 1.5, states=[BUSY, QUIET, BUSY, BUSY]).judge()
    assert decision.outcome == "KEEP"
    assert [bool(each.contaminated) for each in rounds[:4]] == [True, False, True, True]
    assert len(rounds) == first_look(0.01) + 3


def test_a_machine_that_is_always_busy_decides_nothing():
    decision, rounds = Machine(1, 1.5, states=[BUSY] * 1000).judge()
    assert (decision.outcome, decision.ratio) == ("RETEST", None)
    assert len(rounds) > 20


def test_a_budget_without_a_chance_is_refused_with_one_that_has_it():
    with refused("--budget", 20, 10) as caught:
        Machine(1, 1.5).judge(budget_seconds=20)
    budget = float(caught.value.hint.split()[1])
    assert Machine(1, 1.5).judge(budget_seconds=budget)[0].outcome == "KEEP"


@pytest.mark.parametrize("level", [0.05, 0.01, 1e-5])
@pytest.mark.parametrize("rounds", [20, 75, 10**6])
def test_looks_spend_the_level_and_no_more(level, rounds):
    plan = plan_looks(level, rounds)
    assert plan.looks[-1] == min(rounds, 300)
    assert len(plan.looks) <= 10
    for look in plan.looks:
        signs = np.full(look, 0.01)
        assert decide(signs, None, 0.0, plan).outcome == "KEEP"
        assert 2.0**-look <= plan.look_level
    null = np.random.default_rng(1).normal(size=(2000, plan.looks[0]))
    assert np.mean([decide(each, None, 0.0, plan).outcome == "KEEP" for each in null]) <= 1.5 * plan.look_level + 0.002
