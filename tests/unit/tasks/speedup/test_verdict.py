from typing import get_args

import pytest

from paceline.tasks.measure.validity import judge
from paceline.tasks.records.execution import Arm
from paceline.tasks.records.measurement import FurtherStarts, Validity
from paceline.tasks.records.training import CompileStats
from paceline.tasks.speedup.advice import next_steps
from paceline.tasks.speedup.records import SpeedupResult
from paceline.tasks.speedup.steady_state import break_even_steps
from paceline.tasks.speedup.verdict import format_ratio, speedup_result
from tests.support.reports import BASELINE, CANDIDATE, limited, make_probe, make_train

TWO = CANDIDATE.model_copy(update={"num_devices": 2})
BF16 = BASELINE.model_copy(update={"precision": "bf16-mixed"})
COMPILED = BASELINE.model_copy(update={"compile": "step"})
BUSY = judge(Validity(foreign_load=0.9, num_cores=2))
STOLEN = judge(Validity(steal_fraction=0.1))
WINDOWS = ((0, 10, 21.0), (10, 10, 1.0), (20, 10, 1.1), (30, 10, 0.9))  # 20 s of compile and warm-up; 0.1 s a step


def test_sentence_in_full():
    result = speedup_result(make_probe(candidate=BF16), make_train(None), num_cores=2)
    assert result.verdict == (
        f"{result.ratio:.2f} times as fast as 1 device, 32-true, contiguous, eager, foreground (95 % interval "
        f"{result.low:.2f} to {result.high:.2f} within this process, 12 paired rounds): using bf16 arithmetic pays; "
        "the step is probably compute-bound, as no data, communication or launch bottleneck showed "
        "(inferred; --diagnose measures it)."
    )
    assert result.ratio == pytest.approx(1.5, rel=0.02)
    assert (result.significant, result.significant_within_process) == (None, True), "by one start, not across runs"
    assert (result.contaminated, result.num_blocks) == (False, 12)
    assert result.efficiency is None
    assert result.baseline_samples_per_second == pytest.approx(500, rel=0.02)
    assert result.candidate_samples_per_second == pytest.approx(750, rel=0.02)


def test_a_diverged_arm_is_named():
    probe = make_probe(candidate=BF16).model_copy(update={"diverged": ("candidate", "half_batch")})
    result = speedup_result(probe, make_train(None), num_cores=2)
    assert result.verdict.endswith(" The loss of the candidate diverged, so the ratio is not that of trainings.")
    assert result.diverged == ("candidate", "half_batch")


def test_waits_for_data_that_were_not_measured_are_not_called_absent():
    """On a GPU nothing but the probe's arm without input measures them."""
    result = speedup_result(make_probe(candidate=BF16), make_train(None, data_wait_fraction=None))
    assert result.cause == "compute-bound"
    assert "no data" not in result.verdict
    assert "waiting for data was not measured" in result.verdict


def test_a_step_that_is_one_launch_is_not_launch_bound():
    captured = BASELINE.model_copy(update={"compile": "graph"})
    small = {"samples_per_step": {"baseline": 2, "candidate": 2}}
    assert speedup_result(make_probe(candidate=captured, **small), make_train(None)).cause == "compute-bound"
    assert speedup_result(make_probe(candidate=BF16, **small), make_train(None)).cause == "launch-bound"


def test_ratios_are_rounded_for_reading():
    rounded = {1.456: "1.46", 0.804: "0.80", 1.004: "1.004", 2.318: "2.3", 12.34: "12.3"}
    assert {ratio: format_ratio(ratio) for ratio in rounded} == rounded
    assert [format_ratio(end, 2.03) for end in (1.98, 2.08)] == ["2.0", "2.1"], "ends are rounded like the ratio"


@pytest.mark.parametrize(
    ("cause", "probe", "wait"),
    [
        ("compute-bound", {}, 0.01),
        ("data-bound", {}, 0.4),
        ("launch-bound", {"samples_per_step": {"baseline": 2, "candidate": 2}}, 0.01),
        ("communication-bound", {"candidate": TWO, "efficiency": 0.6}, 0.01),
        ("compute-bound", {"candidate": TWO, "efficiency": 0.97}, 0.01),
        ("no measurable difference", {"ratio": 1.001}, 0.01),
        ("slower", {"ratio": 0.8}, 0.01),
        ("identical arms", {"ratio": 1.0, "candidate": BASELINE}, 0.01),
        ("too few rounds", {"num_rounds": 2}, 0.01),
        ("contaminated machine", {"validity": BUSY}, 0.01),
        ("contaminated machine", {"validity": STOLEN}, 0.01),
    ],
)
def test_causes(cause, probe, wait):
    result = speedup_result(make_probe(**probe), make_train(None, data_wait_fraction=wait), num_cores=2)
    assert result.cause == cause
    assert result.verdict.endswith(".")
    assert "{" not in result.verdict


def test_cores_that_the_probe_did_not_record_are_taken_from_the_host():
    probe = make_probe(validity=judge(Validity(foreign_load=0.9)))
    assert speedup_result(probe, num_cores=64).contaminated is False
    assert speedup_result(probe).contaminated is True


def test_contaminated_ratio_is_given_and_marked():
    result = speedup_result(make_probe(validity=BUSY), make_train(None))
    assert result.contaminated is True
    assert result.ratio == pytest.approx(1.5, rel=0.02)
    assert "disturbed meanwhile (0.90 of 2 cores busy with other processes (limit 0.25))" in result.verdict
    same = speedup_result(make_probe(ratio=1.0, candidate=BASELINE, validity=BUSY))
    assert same.cause == "identical arms"
    assert "disturbed" in same.verdict


def test_training_shorter_than_its_start_up_is_too_small():
    small = make_train(None, seconds=25.0, startup_seconds=4.0, windows=WINDOWS)
    result = speedup_result(make_probe(), small)
    assert result.cause == "too small"
    assert "the training took 5.0 s, its start-up and first steps 24.0 s" in result.verdict
    assert speedup_result(make_probe(), make_train(None, startup_seconds=4.0)).cause == "compute-bound"
    assert speedup_result(make_probe(), make_train(None, seconds=1.0)).cause == "compute-bound"  # start-up not known


@pytest.mark.parametrize(
    ("num_steps", "ratio", "cause"),
    [
        (300, 1.5, "compile not amortised"),  # 20 s, of which 300 steps bring 0.05 s each back
        (900, 1.5, "compute-bound"),
        (10_000, 0.9, "compile not amortised"),  # slower: nothing comes back
    ],
)
def test_compile_is_weighed_against_what_it_saves(num_steps, ratio, cause):
    train = make_train(None, windows=WINDOWS, num_steps=num_steps)
    assert speedup_result(make_probe(ratio=ratio, candidate=COMPILED), train).cause == cause


def test_compile_is_not_weighed_without_an_arm_that_shows_its_saving():
    train = make_train(None, windows=WINDOWS, num_steps=300)
    both = CANDIDATE.model_copy(update={"compile": "step"})
    assert speedup_result(make_probe(candidate=both), train).cause == "compute-bound"
    bare = make_train(None, windows=WINDOWS[:2], num_steps=300)
    assert speedup_result(make_probe(candidate=COMPILED), bare).cause == "compute-bound"
    probe = make_probe(candidate=both)
    rounds = tuple((*blocks, blocks[0].model_copy(update={"arm": "uncompiled"})) for blocks in probe.rounds)
    probe = probe.model_copy(update={"rounds": rounds, "others": {"uncompiled": CANDIDATE}})
    assert speedup_result(probe, train).cause == "compile not amortised"


@pytest.mark.parametrize(
    ("cause", "setting"),
    [
        ("contention", "`execution.num_devices=1`"),
        ("too small", "`recipe.num_epochs=100`"),
        ("compile not amortised", "`execution.compile=off`"),
    ],
)
def test_advice_fits_the_cause(report, cause, setting):
    results = (SpeedupResult(cause=cause), report.evaluate)
    assert any(
        setting in step for step in next_steps(report.config, report.plan, report.prepared, report.train, *results)
    )


def test_unknown_stays_unknown():
    assert speedup_result(None) == SpeedupResult(verdict="not measured: the run had no probe", cause="not measured")
    quiet = speedup_result(make_probe(validity=Validity()))
    assert quiet.contaminated is None
    few = speedup_result(make_probe(num_rounds=1))
    assert few.ratio is not None
    assert (few.low, few.high, few.significant) == (None, None, None)


def test_identical_arms_that_differ_are_distrusted():
    result = speedup_result(make_probe(ratio=1.2, candidate=BASELINE))
    assert result.cause == "identical arms"
    assert "distrust" in result.verdict


def test_efficiency_with_interval():
    result = speedup_result(make_probe(candidate=TWO, efficiency=0.9))
    assert result.efficiency == pytest.approx(0.9, rel=0.02)
    assert result.efficiency_low < result.efficiency < result.efficiency_high


def test_break_even_is_what_compiling_took_over_what_a_step_saves():
    """0.1 s a step, 1.5 x the eager arm's speed: 0.05 s are saved."""
    stats = CompileStats(num_calls=300, num_graphs=1, hit_rate=0.99, seconds=20.0)
    train = make_train(make_probe(ratio=1.5, candidate=COMPILED), windows=WINDOWS, compile=stats)
    assert break_even_steps(train) == pytest.approx(400, rel=0.02)
    assert (
        break_even_steps(make_train(make_probe(ratio=0.9, candidate=COMPILED), windows=WINDOWS, compile=stats)) is None
    )
    assert break_even_steps(make_train(make_probe(), windows=WINDOWS, compile=stats)) is None, "nothing to compare with"
    assert break_even_steps(make_train(make_probe(candidate=COMPILED), windows=WINDOWS)) is None


@pytest.mark.parametrize("name", ["precision", "memory_format", "compile", "loading"])
def test_every_execution_has_words(name):
    for value in get_args(Arm.model_fields[name].annotation):
        for ratio in (1.5, 0.7):
            arm = BASELINE.model_copy(update={name: value})
            result = speedup_result(make_probe(ratio=ratio, candidate=arm), make_train(None))
            assert result.ratio == pytest.approx(ratio, rel=0.02)
            assert arm == BASELINE or "the same execution" not in result.verdict


def test_what_differs_in_threads_alone_is_not_the_same_execution():
    result = speedup_result(make_probe(candidate=BASELINE.model_copy(update={"num_threads": 3})), make_train(None))
    assert "using other numbers of threads pays" in result.verdict


def test_a_compilation_costs_what_it_took_in_the_probe():
    """Whose code the training found: its own first steps are as short as the others."""
    steady = tuple((first, number, number * 0.1) for first, number, _ in WINDOWS)
    stats = CompileStats(num_calls=300, num_graphs=1, hit_rate=0.99, seconds=20.0)
    train = make_train(None, windows=steady, num_steps=300, compile=stats)
    probe = make_probe(ratio=1.5, candidate=COMPILED)
    assert speedup_result(probe, train).cause == "compile not amortised"
    warm = train.model_copy(update={"compile": stats.model_copy(update={"seconds": 1.0})})
    assert speedup_result(probe, warm).cause == "compute-bound"


def test_settings_that_were_measured_only_together_get_no_credit():
    """A run said that bf16, the layout and the loading pay, while bf16 alone cost a third."""
    verdict = speedup_result(make_probe(ratio=1.5), make_train(None)).verdict
    assert "not measured singly: resident loading, the channels-last layout and bf16 arithmetic; the step" in verdict
    assert "pay" not in verdict


def test_the_typical_step_stands_next_to_the_ratio_where_the_two_differ():
    probe = make_probe(1.5)
    typical = {"baseline": 2e-3, "candidate": 1.9e-3}
    rounds = tuple(
        tuple(block.model_copy(update={"typical_seconds_per_sample": typical[block.arm]}) for block in blocks)
        for blocks in probe.rounds
    )
    found = speedup_result(probe.model_copy(update={"rounds": rounds}))
    assert found.ratio == pytest.approx(1.5, rel=0.01)
    assert found.typical_ratio == pytest.approx(2 / 1.9)
    assert "The typical step is 1.05 times as fast (95 % interval 1.05 to 1.05)" in found.verdict
    alike = speedup_result(probe)
    assert (alike.typical_ratio, "typical" in alike.verdict) == (None, False)


def test_warm_up_and_carry_over_are_reported_and_the_interval_allows_for_them():
    probe = make_probe(1.02, noise=0.003)
    plain = speedup_result(probe)
    assert (plain.num_warm_up, plain.carry_over_p > 0.05, "depends on" in plain.verdict) == (0, True, False)
    rounds = [list(blocks) for blocks in probe.rounds]
    for number, blocks in enumerate(rounds):
        blocks.sort(key=lambda block: block.arm, reverse=bool(number % 2))
        if number % 2:  # the baseline runs second
            slow = blocks[1].seconds_per_sample * 1.05
            blocks[1] = blocks[1].model_copy(update={"seconds_per_sample": slow})
    found = speedup_result(probe.model_copy(update={"rounds": tuple(map(tuple, rounds)), "warm_up": tuple(rounds[:2])}))
    assert (found.num_warm_up, found.num_blocks) == (2, 12)
    assert found.carry_over == pytest.approx(0.025, abs=0.005)
    assert found.carry_over_p < 0.01
    assert "The first 2 rounds were warm-up and do not count." in found.verdict
    assert "the ratio may be 2." in found.verdict
    assert "too high; the interval allows for it" in found.verdict
    assert found.low < 1.02 < found.high


def test_an_interval_is_of_one_process_until_earlier_starts_show_how_starts_differ():
    probe = make_probe(1.03, noise=0.005)
    alone = speedup_result(probe, earlier=(1.01, 1.05, 1.03))
    assert (alone.scope, alone.num_starts, alone.starts) == ("within this process", 0, None)
    assert (alone.significant, alone.significant_within_process) == (None, True)
    assert "within this process, 12 paired rounds" in alone.verdict
    starts = (1.01, 1.05, 1.03, 0.98, 1.06)
    found = speedup_result(probe, earlier=starts)
    assert (found.scope, found.num_starts, found.starts) == ("across starts", 5, "borrowed")
    assert (found.significant, found.significant_within_process) == (False, True)
    assert found.cause == "no measurable difference"
    assert "across starts, by 5 earlier ones, 12 paired rounds" in found.verdict
    assert (found.process_low, found.process_high) == (alone.low, alone.high)
    assert found.low < alone.low < found.ratio < alone.high < found.high


def test_a_short_step_without_a_diagnosis_is_only_probably_launch_bound():
    small = {"samples_per_step": {"baseline": 2, "candidate": 2}}
    result = speedup_result(make_probe(candidate=BF16, **small), make_train(None))
    assert "the step is probably launch-bound, with 2.7 ms (inferred; --diagnose measures it)" in result.verdict


def test_a_step_whose_memory_is_nearer_to_its_limit_than_its_arithmetic_is_memory_bound():
    probe = make_probe(candidate=BF16)
    train = make_train(probe, **limited(of_limit=0.02, of_bandwidth=0.6))
    result = speedup_result(probe, train)
    assert result.cause == "memory-bound"
    assert (
        "probably memory-bound at 2.0% of what this device does, and moves data at 60% of its memory" in result.verdict
    )
    assert speedup_result(probe, make_train(probe, **limited())).cause == "compute-bound"
    neither = make_train(probe, **limited(of_limit=0.01, of_bandwidth=0.03))
    assert speedup_result(probe, neither).cause == "compute-bound", "far from either limit"


def test_processes_of_this_run_count_before_earlier_starts_and_disturbed_ones_not_at_all():
    probe, earlier = make_probe(1.03, noise=0.005), (1.01, 1.05, 1.03, 0.98, 1.06)
    further = [make_probe(ratio, 4, 0.005) for ratio in (1.05, 1.02, 1.04)]
    found = speedup_result(probe, earlier=earlier, starts=FurtherStarts(probes=further, reason="took 30 s"))
    assert (found.scope, found.starts, found.num_starts) == ("across starts", "measured", 4)
    assert (found.significant, found.starts_reason) == (True, "took 30 s")
    assert "across starts, by 4 processes, 12 paired rounds" in found.verdict
    assert found.start_ratios == pytest.approx((1.03, 1.05, 1.02, 1.04), abs=0.01)
    assert found.process_low < found.process_ratio < found.process_high < found.high
    assert found.variance.process > 0
    disturbed = [each.model_copy(update={"validity": BUSY}) for each in further[1:]]
    without = speedup_result(probe, earlier=earlier, starts=FurtherStarts(probes=(further[0], *disturbed)))
    assert (without.starts, without.start_ratios, without.variance.process) == ("borrowed", (), None)
