import itertools

import pytest

from paceline.conf.load import load
from paceline.tasks.records.execution import BASELINE, Arm
from paceline.tasks.records.hardware import Hardware
from paceline.tasks.records.measurement import AutotuneResult, Block, ProbeResult, Validity
from paceline.tasks.records.record import Choice
from paceline.tasks.speedup.factor_card import single_gains
from paceline.tasks.train.autotune.choice import choose, combine_roles, faster_plan, plan_of_probe, winning_roles
from paceline.tasks.train.autotune.search import alternatives, layer_arms
from paceline.tasks.train.plan import arm_of, resolve

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
    return AutotuneResult(probes=probes, compile_seconds=compile_seconds, budget_seconds=10.0, seconds=5.0, **changes)


def changed(**changes):
    return RULES.model_copy(update=changes)


def test_a_faster_arm_is_taken_and_the_reason_is_its_measurement():
    probe = probe_of(RULES, {"baseline": changed(num_threads=2)}, {"candidate": 0.010, "baseline": 0.008})
    plan = choose(PLAN, search_of(probe), RULES, STEPS)
    assert plan.num_threads == 2
    assert plan.reasons["num_threads"].reason.startswith("timed before training: 2 1.25 x [1.2")
    assert "the speed of 4" in plan.reasons["num_threads"].reason
    assert plan.model_copy(update={"num_threads": 4, "reasons": PLAN.reasons}) == PLAN


def test_settings_that_are_faster_together_quote_that_measurement():
    both = changed(num_threads=2, loading="streaming")
    arms = {"baseline": changed(num_threads=2), "both": both}
    probe = probe_of(RULES, arms, {"candidate": 0.010, "baseline": 0.010, "both": 0.005})
    plan = choose(PLAN, search_of(probe), RULES, STEPS)
    assert (plan.num_threads, plan.loading) == (2, "streaming")
    for name in ("num_threads", "loading"):
        assert "2 and streaming together 2.00 x [" in plan.reasons[name].reason
    assert "; 2 and streaming" in plan.reasons["num_threads"].reason, "after the figure of its own"


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
    both = combine_roles(first, winners)
    assert (set(winners), both) == ({"baseline", "precision"}, changed(num_threads=2, precision="32-true"))
    best = others["baseline"]
    good = probe_of(best, {"baseline": both}, {"candidate": 0.008, "baseline": 0.007})
    bad = probe_of(best, {"baseline": both}, {"candidate": 0.008, "baseline": 0.009})
    assert choose(PLAN, search_of(first, good), RULES, STEPS).precision == "32-true"
    assert choose(PLAN, search_of(first, bad), RULES, STEPS).precision == "bf16-mixed"


def test_what_a_contaminated_machine_has_shown_is_not_gone_by():
    probe = probe_of(RULES, {"baseline": changed(num_threads=2)}, {"candidate": 0.010, "baseline": 0.005})
    plan = choose(PLAN, search_of(probe, validity=Validity(contaminated=True)), RULES, STEPS)
    assert plan.model_copy(update={"reasons": PLAN.reasons}) == PLAN
    assert "timed (while other programs used the machine): 2 2.00 x" in plan.reasons["num_threads"].reason


def test_a_search_on_another_number_of_devices_says_nothing():
    two = changed(num_devices=2)
    probe = probe_of(two, {"baseline": two.model_copy(update={"num_threads": 1})}, {"candidate": 1.0, "baseline": 0.5})
    assert choose(PLAN, search_of(probe), RULES, STEPS).num_threads == PLAN.num_threads


def test_only_what_auto_left_open_is_searched_one_setting_at_a_time():
    assert alternatives(PLAN) == {
        "memory_format": changed(memory_format="contiguous"),
        "num_threads": changed(num_threads=2),
        "precision 32-true": changed(precision="32-true"),
        "loading": changed(loading="streaming"),
    }
    asked = resolve(load("digits", ["execution.precision=bf16-mixed", "execution.num_threads=4"]), HOST, 1000)
    assert set(alternatives(asked)) == {"memory_format", "loading"}
    assert isinstance(asked.reasons["loading"], Choice)
    assert isinstance(RULES, Arm)


SYNTHETIC = RULES.model_copy(update={"variant": "synthetic_input", "loading": "foreground", "batch_size": 4})


def layer_probe(seconds):
    """Times in milliseconds of the four combinations: (precision, memory format)."""
    arms = {
        "candidate": SYNTHETIC,
        "baseline": SYNTHETIC.model_copy(update={"memory_format": "contiguous"}),
        "fp32": SYNTHETIC.model_copy(update={"precision": "32-true"}),
        "both": SYNTHETIC.model_copy(update={"precision": "32-true", "memory_format": "contiguous"}),
    }
    candidate = arms.pop("candidate")
    return probe_of(candidate, arms, dict(zip(("candidate", "baseline", "fp32", "both"), seconds, strict=True)))


XEON = layer_probe((4.0, 6.0, 3.0, 4.2))
"""As on a CPU whose flags name bf16 and whose fp32 is faster: 332 samples/s of it, 241 in bf16 (2026-11-23)."""
EPYC = layer_probe((1.0, 1.5, 2.2, 2.8))


def test_the_layers_decide_on_precision_and_the_reason_quotes_the_figures():
    slow = choose(PLAN, search_of(XEON), RULES, STEPS)
    assert (slow.precision, slow.memory_format, slow.loading) == ("32-true", "channels_last", "resident")
    assert slow.reasons["precision"].reason.startswith("timed before training: 32-true 1.33 x [1.3")
    assert "contiguous 0.67 x" in slow.reasons["memory_format"].reason
    fast = choose(PLAN, search_of(EPYC), RULES, STEPS)
    assert (fast.precision, fast.memory_format) == ("bf16-mixed", "channels_last")
    assert "32-true 0.46 x" in fast.reasons["precision"].reason


def test_a_contaminated_search_decides_on_the_arithmetic_alone():
    busy = Validity(contaminated=True)
    assert choose(PLAN, search_of(XEON, validity=busy), RULES, STEPS).precision == "32-true"
    threads = probe_of(
        SYNTHETIC, {"baseline": SYNTHETIC.model_copy(update={"num_threads": 1})}, {"candidate": 0.01, "baseline": 0.005}
    )
    assert choose(PLAN, search_of(threads, validity=busy), RULES, STEPS).num_threads == PLAN.num_threads
    assert choose(PLAN, search_of(threads), RULES, STEPS).num_threads == 1


def test_settings_are_compared_with_the_best_that_the_layers_have_shown():
    best = changed(precision="32-true")
    later = probe_of(
        best, {"baseline": best.model_copy(update={"loading": "streaming"})}, {"candidate": 3, "baseline": 2}
    )
    plan = choose(PLAN, search_of(XEON, later), RULES, STEPS)
    assert (plan.precision, plan.loading) == ("32-true", "streaming")
    other = probe_of(RULES, {"baseline": changed(loading="streaming")}, {"candidate": 3, "baseline": 2})
    assert choose(PLAN, search_of(XEON, other), RULES, STEPS).loading == "resident"


def test_combinations_that_are_open_are_timed_on_a_batch_that_is_there():
    arms = layer_arms(PLAN)
    assert [(arm.precision, arm.memory_format) for arm in arms] == [
        ("bf16-mixed", "channels_last"),
        ("bf16-mixed", "contiguous"),
        ("32-true", "channels_last"),
        ("32-true", "contiguous"),
    ]
    assert {(arm.variant, arm.compile) for arm in arms} == {("synthetic_input", "off")}
    asked = resolve(
        load("digits", ["execution.precision=bf16-mixed", "execution.memory_format=contiguous"]), HOST, 1000
    )
    assert len(layer_arms(asked)) == 1


SLOW_BF16 = {"candidate": 0.012, "baseline": 0.010}


def test_an_execution_that_the_probe_finds_slower_is_switched():
    probe = probe_of(RULES, {"baseline": BASELINE}, SLOW_BF16)
    plan = faster_plan(PLAN, probe)
    assert (plan.precision, plan.memory_format, plan.loading) == ("32-true", "contiguous", "resident")
    reason = plan.reasons["precision"].reason
    assert reason.startswith("switched before the first step: the probe timed 1 device, 32-true, contiguous")
    assert "at 1.20 x [1.20, 1.21]" in reason
    again = probe_of(arm_of(plan), {"baseline": BASELINE}, SLOW_BF16)
    assert faster_plan(plan, again).loading == "foreground", "with the same arithmetic the loading is what is left"
    assert faster_plan(PLAN, probe_of(RULES, {"baseline": BASELINE}, {"candidate": 0.010, "baseline": 0.010})) is None
    restarted = plan_of_probe(PLAN, RULES, again)
    assert (restarted.precision, restarted.memory_format) == ("32-true", "contiguous")
    assert plan_of_probe(PLAN, RULES, probe) == PLAN


def test_an_arm_that_diverges_is_never_chosen():
    faster = probe_of(RULES, {"baseline": BASELINE}, SLOW_BF16)
    diverged = faster.model_copy(update={"diverged": ("baseline",)})
    assert faster_plan(PLAN, diverged) is None
    assert winning_roles(faster, 0.0, STEPS).keys() == {"baseline"}
    assert winning_roles(diverged, 0.0, STEPS) == {}


def test_what_was_asked_for_is_never_switched():
    asked = resolve(load("digits", ["execution.precision=bf16-mixed"]), HOST, 1000)
    assert faster_plan(asked, probe_of(RULES, {"baseline": BASELINE}, SLOW_BF16)) is None


def test_of_several_devices_one_is_compared_with_the_baseline():
    two = changed(num_devices=2)
    arms = {"baseline": BASELINE, "single": RULES}
    seconds = {"candidate": 0.030, "baseline": 0.010, "single": 0.009}
    assert faster_plan(PLAN, probe_of(two, arms, seconds)) is None, "the devices hold each other up, not the arithmetic"
    assert faster_plan(PLAN, probe_of(two, arms, seconds | {"single": 0.013})).precision == "32-true"


def test_a_compiled_step_that_is_slower_is_not_compiled():
    compiled = changed(compile="step")
    probe = probe_of(
        compiled, {"baseline": BASELINE, "uncompiled": RULES}, {"candidate": 3.0, "baseline": 4.0, "uncompiled": 2.0}
    )
    plan = faster_plan(PLAN.model_copy(update={"compile": "step"}), probe)
    assert (plan.compile, plan.precision) == ("off", "bf16-mixed")


def test_gains_of_single_settings_come_from_arms_that_differ_in_nothing_else():
    gains = single_gains(search_of(XEON), BASELINE, RULES)
    assert {name: round(gain.value, 2) for name, gain in gains.items()} == {"memory_format": 1.5, "precision": 0.75}
    assert single_gains(search_of(XEON, validity=Validity(contaminated=True)), BASELINE, RULES) == {}
    assert single_gains(search_of(XEON), BASELINE, BASELINE) == {}


def test_a_gain_that_copies_of_one_arm_may_show_changes_nothing_and_is_named():
    """Five arms ask for more than one; 4 % are less than copies that differ by 2 % show in one of twenty searches."""
    wide = {f"other {number}": changed(num_threads=number + 2) for number in range(4)} | {
        "baseline": changed(num_threads=2)
    }
    seconds = dict.fromkeys(wide, 0.010) | {"candidate": 0.010, "baseline": 0.0093}
    alone = probe_of(RULES, {"baseline": wide["baseline"]}, seconds)
    assert winning_roles(alone, 0.0, STEPS).keys() == {"baseline"}
    assert winning_roles(probe_of(RULES, wide, seconds), 0.0, STEPS) == {}
    slight = probe_of(RULES, {"baseline": changed(num_threads=2)}, {"candidate": 0.010, "baseline": 0.0096})
    plan = choose(PLAN, search_of(slight), RULES, STEPS)
    assert plan.num_threads == PLAN.num_threads
    assert "no more than copies of one arm differ by" in plan.reasons["num_threads"].reason
    assert faster_plan(PLAN, probe_of(RULES, {"baseline": BASELINE}, {"candidate": 0.010, "baseline": 0.0096})) is None
