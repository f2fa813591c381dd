import itertools

import pytest

from conf.load import load
from tasks.records import Arm, Block, Choice, Hardware, ProbeResult, Search, Validity
from tasks.speedup.choice import choose, combined, winning_roles
from tasks.train.plan import arm_of, resolve
from tasks.train.search import alternatives

NUM_ROUNDS = 8
STEPS = 1000
BATCH = 10
HOST = Hardware(host="here", cpu_name="cpu", num_cores=4, memory_bytes=2**33, cpu_bf16=True)
PLAN = resolve(load("digits"), HOST, 1000)
RULES = arm_of(PLAN)
NOISE = (1.0, 1.002, 0.999, 1.001, 0.998, 1.0, 1.003, 0.997)


def probe_of(candidate, others, step_seconds, noise=NOISE):
    """Rounds in which each arm takes its time, but for a little noise."""
    arms = {"candidate": candidate} | others
    rounds = tuple(
        tuple(
            Block(arm=role, seconds_per_sample=step_seconds[role] * noise[(i + j) % len(noise)] / BATCH, num_steps=1)
            for j, role in enumerate(arms)
        )
        for i in range(NUM_ROUNDS)
    )
    return ProbeResult(
        baseline=others["baseline"],
        candidate=candidate,
        batch_size=BATCH,
        samples_per_step=dict.fromkeys(arms, BATCH),
        others={role: arm for role, arm in others.items() if role != "baseline"},
        rounds=rounds,
        seconds=1.0,
        stopped_because="all blocks done",
    )


def search_of(*probes, compile_seconds=0.0, **changes):
    return Search(probes=probes, compile_seconds=compile_seconds, budget_seconds=10.0, seconds=5.0, **changes)


def changed(**changes):
    return RULES.model_copy(update=changes)


def test_a_faster_arm_is_taken_and_the_reason_is_its_measurement():
    probe = probe_of(RULES, {"baseline": changed(num_threads=2)}, {"candidate": 0.010, "baseline": 0.008})
    plan = choose(PLAN, search_of(probe), RULES, STEPS)
    assert plan.num_threads == 2
    assert plan.reasons["num_threads"].reason.startswith("timed before training: 2 1.25 x [1.2")
    assert "the speed of 4" in plan.reasons["num_threads"].reason
    assert plan.model_copy(update={"num_threads": 4, "reasons": PLAN.reasons}) == PLAN


@pytest.mark.parametrize(
    ("seconds", "noise"),
    [
        (0.00995, NOISE),  # faster, but by a trifle
        (0.012, NOISE),  # slower
        (0.009, tuple(itertools.islice(itertools.cycle((1.0, 2.0, 0.5)), NUM_ROUNDS))),  # perhaps faster
    ],
)
def test_what_is_not_certainly_faster_changes_nothing_but_is_told(seconds, noise):
    probe = probe_of(RULES, {"baseline": changed(loading="streaming")}, {"candidate": 0.01, "baseline": seconds}, noise)
    plan = choose(PLAN, search_of(probe), RULES, STEPS)
    assert plan.loading == "resident"
    assert plan.reasons["loading"].reason.startswith(PLAN.reasons["loading"].reason)
    assert "timed: streaming" in plan.reasons["loading"].reason


@pytest.mark.parametrize(("num_steps", "chosen"), [(10_000, "step"), (5_000, "off")])
def test_compiling_must_win_back_what_it_takes(num_steps, chosen):
    """2 ms a step are saved: 15 s after 7,500 steps."""
    probe = probe_of(RULES, {"baseline": changed(compile="step")}, {"candidate": 0.010, "baseline": 0.008})
    plan = choose(PLAN, search_of(probe, compile_seconds=15.0), RULES, num_steps)
    assert plan.compile == chosen
    assert "compiled in 15 s" in plan.reasons["compile"].reason


def test_winners_are_combined_and_replace_the_best_only_if_together_they_are_faster_still():
    others = {"baseline": changed(num_threads=2), "precision": changed(precision="32-true")}
    first = probe_of(RULES, others, {"candidate": 0.010, "baseline": 0.008, "precision": 0.009})
    winners = winning_roles(first, 0.0, STEPS)
    both = combined(first, winners)
    assert (set(winners), both) == ({"baseline", "precision"}, changed(num_threads=2, precision="32-true"))
    best = others["baseline"]
    good = probe_of(best, {"baseline": both}, {"candidate": 0.008, "baseline": 0.007})
    bad = probe_of(best, {"baseline": both}, {"candidate": 0.008, "baseline": 0.009})
    assert choose(PLAN, search_of(first, good), RULES, STEPS).precision == "32-true"
    assert choose(PLAN, search_of(first, bad), RULES, STEPS).precision == "bf16-mixed"


def test_what_a_contaminated_machine_has_shown_is_not_gone_by():
    probe = probe_of(RULES, {"baseline": changed(num_threads=2)}, {"candidate": 0.010, "baseline": 0.005})
    assert choose(PLAN, search_of(probe, validity=Validity(contaminated=True)), RULES, STEPS) == PLAN


def test_a_search_on_another_number_of_devices_says_nothing():
    two = changed(num_devices=2)
    probe = probe_of(two, {"baseline": two.model_copy(update={"num_threads": 1})}, {"candidate": 1.0, "baseline": 0.5})
    assert choose(PLAN, search_of(probe), RULES, STEPS).num_threads == PLAN.num_threads


def test_only_what_auto_left_open_is_searched_one_setting_at_a_time():
    assert alternatives(PLAN) == {
        "memory_format": changed(memory_format="contiguous"),
        "num_threads": changed(num_threads=2),
        "precision": changed(precision="32-true"),
        "loading": changed(loading="streaming"),
    }
    asked = resolve(load("digits", ["execution.precision=bf16-mixed", "execution.num_threads=4"]), HOST, 1000)
    assert set(alternatives(asked)) == {"memory_format", "loading"}
    assert isinstance(asked.reasons["loading"], Choice)
    assert isinstance(RULES, Arm)
