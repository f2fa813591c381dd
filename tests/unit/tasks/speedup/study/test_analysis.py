import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.tasks.measure.paired_ratio import FIXED_CONFIDENCE, location_interval
from paceline.tasks.speedup.study.analysis import (
    break_even,
    budget_differences,
    ladder,
    scalings,
    summarise_arms,
    target_accuracy,
    winner,
)
from paceline.tasks.speedup.study.design import balanced_order
from paceline.tasks.speedup.study.pairs import StudyRuns
from paceline.tasks.speedup.study.records import ArmRun
from tests.support.studies import PRECISION, arms_of, training


def summaries(arms, runs, **kwargs):
    return {summary.arm.name: summary for summary in summarise_arms(StudyRuns(arms, runs), **kwargs)}


def test_ratios_are_taken_repeat_by_repeat_so_that_a_drift_leaves_them_alone():
    arms = arms_of(PRECISION)
    runs = [
        training(arm, repeat, rate * 0.5**repeat)
        for repeat in range(4)
        for arm, rate in zip(arms, (100, 200), strict=True)
    ]
    found = summaries(arms, runs)["precision=bf16-mixed"]
    assert found.ratio.value == pytest.approx(2)
    assert found.ratio.low == pytest.approx(2)
    assert found.num_pairs == 4
    assert found.significant
    assert found.parity == "on par"


def test_arms_of_different_work_are_never_divided():
    arms = arms_of("model.width=8,16", PRECISION)
    runs = [training(arm, repeat, 100.0) for repeat in range(3) for arm in arms]
    found = summaries(arms, runs)
    assert {name for name, summary in found.items() if summary.ratio is None} == {
        "width=8, precision=32-true",
        "width=16, precision=32-true",
    }
    foreign = [
        run.model_copy(update={"facts": run.facts | {"code": "other"}}) if "bf16" in run.arm else run for run in runs
    ]
    for summary in summaries(arms, foreign).values():
        assert summary.ratio is None
        assert summary.end_to_end_ratio is None
        assert summary.parity == "unknown"
    assert budget_differences(StudyRuns(arms, foreign)) == ()


def test_a_crashed_arm_is_reported_and_the_others_stand():
    arms = arms_of(PRECISION, "execution.loading=resident,streaming")
    runs = [training(arm, repeat, 100.0) for repeat in range(3) for arm in arms[:3]]
    runs += [
        ArmRun(arm=arms[3].name, repeat=repeat, position=0, run_id="r", status="failed", error="out of memory")
        for repeat in range(3)
    ]
    found = summaries(arms, runs)
    assert (found[arms[3].name].num_failed, found[arms[3].name].error) == (3, "out of memory")
    assert found[arms[3].name].ratio is None
    assert found[arms[1].name].ratio.value == pytest.approx(1)
    assert found[arms[1].name].significant is False


def test_contaminated_pairs_are_left_out_while_three_clean_ones_remain():
    arms = arms_of(PRECISION)
    runs = [training(arm, repeat, rate) for repeat in range(4) for arm, rate in zip(arms, (100, 150), strict=True)]
    runs[1] = training(arms[1], 0, 10.0, contaminated=True)
    found = summaries(arms, runs)[arms[1].name]
    assert (found.num_pairs, found.contaminated) == (3, 1)
    assert found.ratio.value == pytest.approx(1.5)
    baseline = [training(arms[0], 0, 1.0, contaminated=True), *runs[1:]]
    assert summaries(arms, baseline)[arms[1].name].ratio.value == pytest.approx(1.5)


def test_efficiency_is_against_the_same_execution_on_fewer_devices():
    arms = arms_of(PRECISION, "execution.num_devices=1,2", base=["recipe.batch_scaling=strong"])
    rates = {"32-true": 100.0, "bf16-mixed": 200.0}
    runs = []
    for repeat in range(3):
        for arm in arms:
            precision = arm.overrides[0].partition("=")[2]
            rate = rates[precision] * (1.6 if "num_devices=2" in arm.name else 1)
            runs.append(training(arm, repeat, rate, base=["recipe.batch_scaling=strong"]))
    found = summaries(arms, runs)
    assert found["precision=bf16-mixed, num_devices=2"].ratio.value == pytest.approx(3.2)
    assert found["precision=bf16-mixed, num_devices=2"].efficiency.value == pytest.approx(0.8)
    assert found["precision=bf16-mixed, num_devices=1"].efficiency is None
    kinds = scalings(StudyRuns(arms, runs))
    assert [scaling.kind for scaling in kinds] == ["strong", "strong"]
    assert kinds[0].points[1].karp_flatt.value == pytest.approx((1 / 1.6 - 0.5) / 0.5)
    assert "at least 4" in kinds[0].refused


def test_the_ladder_multiplies_up_and_shows_the_interaction():
    arms = arms_of(PRECISION, "execution.loading=foreground,resident", ladder=True)
    rates = dict(zip([arm.name for arm in arms], (100, 150, 450, 200), strict=True))
    runs = [training(arm, repeat, float(rates[arm.name])) for repeat in range(3) for arm in arms]
    rungs, interaction = ladder(StudyRuns(arms, runs))
    assert [rung.contribution.value for rung in rungs] == pytest.approx([1.5, 3.0])
    assert [rung.alone.value for rung in rungs] == pytest.approx([1.5, 2.0])
    assert interaction.value == pytest.approx(4.5 / (1.5 * 2.0))


def test_a_contaminated_training_is_in_no_interaction():
    arms = arms_of(PRECISION, "execution.loading=foreground,resident", ladder=True)
    rates = dict(zip([arm.name for arm in arms], (100, 150, 450, 200), strict=True))
    runs = [training(arm, repeat, float(rates[arm.name])) for repeat in range(5) for arm in arms]
    for disturbed in (0, 5):  # a baseline, and another arm of another repeat
        runs[disturbed] = runs[disturbed].model_copy(update={"samples_per_second": 10.0, "contaminated": True})
    interaction = ladder(StudyRuns(arms, runs))[1]
    assert interaction.value == pytest.approx(4.5 / (1.5 * 2.0))
    foreign = [run.model_copy(update={"facts": run.facts | {"code": run.arm}}) for run in runs]
    assert ladder(StudyRuns(arms, foreign))[1] is None


@given(st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1e4)), min_size=1, max_size=8))
def test_budget_differences_add_up(seconds):
    arms = arms_of(PRECISION)
    names = [f"item {number}" for number in range(len(seconds))]
    runs = [
        training(arm, 0, 100.0, time_budget=dict(zip(names, column, strict=True)))
        for arm, column in zip(arms, zip(*seconds, strict=True), strict=True)
    ]
    (found,) = budget_differences(StudyRuns(arms, runs))
    total = sum(item.seconds for item in found.items) - sum(item.baseline_seconds for item in found.items)
    assert found.difference == pytest.approx(total, abs=1e-6)
    assert sum(item.difference for item in found.items) == pytest.approx(found.difference, abs=1e-6)


def test_break_even_counts_the_epochs_that_pay_for_a_longer_start():
    arms = arms_of(PRECISION)
    base = training(arms[0], 0, 100.0, startup_seconds=5.0, epoch_seconds=10.0, first_epoch_seconds=10.0)
    slow_start = training(arms[1], 0, 200.0, startup_seconds=5.0, epoch_seconds=6.0, first_epoch_seconds=26.0)
    assert break_even([base], [slow_start]).value == pytest.approx(20 / 4)
    assert break_even([base], [slow_start]).low is None, "one repeat has no interval"
    assert break_even([slow_start], [base]) is None
    assert break_even([base], [base]).value == 0.0
    assert break_even([base], [slow_start.model_copy(update={"epoch_seconds": None})]) is None


def test_break_even_has_an_interval_where_an_epoch_saves_for_sure():
    arms = arms_of(PRECISION)
    rng = np.random.default_rng(3)
    pairs = [
        (
            training(arms[0], repeat, 100.0, epoch_seconds=10.0 + rng.normal(0, noise), first_epoch_seconds=10.0),
            training(arms[1], repeat, 200.0, epoch_seconds=6.0 + rng.normal(0, noise), first_epoch_seconds=26.0),
        )
        for noise in (0.1, 30.0)
        for repeat in range(5)
    ]
    sure, unsure = ([list(side) for side in zip(*some, strict=True)] for some in (pairs[:5], pairs[5:]))
    found = break_even(*sure)
    assert found.low < found.value < found.high
    assert found.high < 1.2 * found.low
    assert break_even(*unsure) is None or break_even(*unsure).high is None


def test_an_arm_that_is_significant_alone_may_be_chance_among_many():
    arms = arms_of("execution.num_threads=1,2,3,4")
    gains = {arms[1].name: (0.02, 0.03, 0.045)}
    runs = [
        training(arm, repeat, 100.0 * np.exp(gains.get(arm.name, (0.01, -0.01, 0.0))[repeat] * (not arm.is_baseline)))
        for arm in arms
        for repeat in range(3)
    ]
    found = summaries(arms, runs)[arms[1].name]
    assert found.ratio.low > 1
    assert (found.significant, found.p_value > 0.05) == (False, True)
    alone = summaries(arms[:2], [run for run in runs if run.arm in (arms[0].name, arms[1].name)])[arms[1].name]
    assert alone.significant


@pytest.mark.parametrize(("again", "confirmed"), [(1.5, True), (1.0, False)])
def test_a_winner_is_called_so_by_fresh_trainings_alone(again, confirmed):
    arms = arms_of("execution.precision=32-true,bf16-mixed,64-true")
    rates = {arm.name: rate for arm, rate in zip(arms, (100.0, 200.0, 50.0), strict=True)}
    runs = [training(arm, repeat, rates[arm.name]) for repeat in range(3) for arm in arms]
    fresh = [
        training(arm, repeat, rate, is_fresh=True)
        for repeat in range(3, 6)
        for arm, rate in ((arms[0], 100.0), (arms[1], 100.0 * again))
    ]
    found = summaries(arms, [*runs, *fresh])
    best = found[arms[1].name]
    assert best.ratio.value == pytest.approx(2), "what it was chosen by stays as it was"
    assert best.num_done == 3
    assert best.confirmation.value == pytest.approx(again)
    assert best.confirmed is confirmed
    chosen = winner(tuple(found.values()), "")
    assert chosen.arm.name == (arms[1].name if confirmed else arms[0].name)
    assert found[arms[2].name].confirmed is None


def test_time_to_target_defaults_to_what_the_baseline_reaches():
    arms = arms_of(PRECISION)
    base = [
        training(arms[0], repeat, 100.0, validation=((8.0, 0.5), (12.0, 0.8 + repeat / 100))) for repeat in range(3)
    ]
    quick = [training(arms[1], repeat, 100.0, validation=((6.0, 0.7), (9.0, 0.85))) for repeat in range(3)]
    never = [training(arms[1], repeat, 100.0, validation=((6.0, 0.7),)) for repeat in range(3)]
    assert target_accuracy(StudyRuns(arms, base), "") == pytest.approx(0.8)
    assert summaries(arms, base + quick)[arms[1].name].seconds_to_target == 9.0
    assert summaries(arms, base + never)[arms[1].name].seconds_to_target is None
    assert summaries(arms, base + quick, target=0.99)[arms[1].name].seconds_to_target is None


def test_cost_is_devices_times_time_times_price():
    arms = arms_of("execution.num_devices=1,2")
    runs = [training(arm, 0, 1000 / 36.0) for arm in arms]
    found = summaries(arms, runs, price=2.0)
    assert found["num_devices=2"].cost_per_epoch == pytest.approx(2 * 2.0 * 36 / 3600)
    assert found["num_devices=1"].cost_per_epoch == pytest.approx(2.0 * 36 / 3600)


def noise(kind, rng, size):
    if kind == "heavy tails":
        return rng.standard_t(3, size) * 0.02
    if kind == "drift":
        return np.linspace(0, 0.3, size) + rng.normal(0, 0.02, size)
    hits = rng.random(size) < 0.15  # bursts: others take up to half of the machine for one or two trainings
    hits |= np.roll(hits, 1)
    return rng.normal(0, 0.01, size) - hits * rng.uniform(0.05, 0.5, size)


@pytest.mark.parametrize("kind", ["heavy tails", "drift", "bursts"])
@pytest.mark.parametrize("num_repeats", [3, 4, 6, 8])
def test_the_interval_of_an_arm_covers_and_identical_arms_are_rarely_called_different(kind, num_repeats):
    rng = np.random.default_rng([num_repeats, len(kind)])
    names = ["a", "b", "c", "d"]
    order = [(name, repeat) for repeat, row in enumerate(balanced_order(names, num_repeats, 1)) for name in row]
    places = np.array([[order.index((name, repeat)) for repeat in range(num_repeats)] for name in ("a", "d")])
    logs = np.array([noise(kind, rng, len(order)) for _ in range(2000)])
    _, low, high = location_interval(logs[:, places[1]] - logs[:, places[0]], FIXED_CONFIDENCE)
    covers = (low <= 0) & (high >= 0)
    assert covers.mean() >= 0.95, "identical arms: what is not covered is a false alarm"


def test_the_ratio_of_a_study_is_that_estimator():
    arms = arms_of(PRECISION)
    logs = np.random.default_rng(1).normal(0, 0.1, (2, 6))
    runs = [
        training(arm, repeat, 100 * float(np.exp(logs[i, repeat]))) for i, arm in enumerate(arms) for repeat in range(6)
    ]
    value, low, high = location_interval(logs[1] - logs[0])
    found = summaries(arms, runs)[arms[1].name].ratio
    assert np.log([found.value, found.low, found.high]) == pytest.approx(np.array([value, low, high]))
