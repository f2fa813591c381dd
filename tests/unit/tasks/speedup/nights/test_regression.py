"""A run among those before it: what is found, what is left alone, and how often ordinary noise is called a change."""

import numpy as np
import pytest

from paceline.conf.lightning import Objective
from paceline.tasks.speedup.nights.prediction_limit import level_of, scale_qn
from paceline.tasks.speedup.nights.regression import MAX_GAP_DAYS, MIN_BEFORE, RunMetrics, Tolerances, judge
from tests.support.ordinary_nights import alarms, ordinary_series, slowed

RATE = 1000.0
CONTROL = 500.0
DAY = 86400.0


def night(rate, **figures):
    """A run by its throughput."""
    return RunMetrics(**{"run_id": "now", "baseline_throughput": CONTROL} | figures, throughput=rate)


def nights(rates, **figures):
    """Runs by their throughput, the oldest first."""
    return [night(rate, run_id=str(number), **figures) for number, rate in enumerate(rates)]


def noisy(rng, number, spread=0.01):
    return RATE * np.exp(rng.normal(0, spread, number))


@pytest.fixture
def rng():
    return np.random.default_rng(3)


def first_alarm(rates):
    """The first night that is called a regression, found as it happens; None if none is."""
    runs = nights(rates)
    return next((index for index in range(len(runs)) if judge(runs[: index + 1]).verdict == "regression"), None)


def test_qn_is_the_standard_deviation_of_normal_noise_and_is_not_moved_by_outliers(rng):
    values = rng.normal(5, 2, 2000)
    assert scale_qn(values) == pytest.approx(2, rel=0.06)
    values[:600] = 1e6
    assert scale_qn(values) < 6
    small = [scale_qn(rng.normal(0, 1, 7)) for _ in range(3000)]
    assert np.mean(small) == pytest.approx(1, rel=0.06)


@pytest.mark.parametrize(("goal", "worse"), [("minimize", 3.1), ("maximize", 2.9)])
def test_a_metric_of_own_code_is_judged_by_its_direction_and_as_a_share_of_its_level(rng, goal, worse):
    before = nights([RATE] * 8)
    before = [run.model_copy(update={"score": 3 * np.exp(rng.normal(0, 1e-4))}) for run in before]
    objective = Objective(name="val_loss", goal=goal)
    for last, verdict in ((worse, "regression"), (6 - worse, "normal"), (3 + (worse - 3) / 2, "normal")):
        judged = judge([*before, night(RATE, score=last)], Tolerances(score=0.01), objective)
        assert judged.verdict == verdict
    judged = judge([*before, night(RATE, score=worse)], Tolerances(score=0.01), objective)
    assert judged.tag == "val_loss"
    assert (
        f"val_loss {worse:.4g}, {'above' if goal == 'minimize' else 'below'} the 3 of the 8 runs before" in judged.text
    )


def test_too_few_runs_are_not_judged():
    judged = judge(nights([RATE] * MIN_BEFORE))
    assert judged.verdict == "too few runs"
    assert str(MIN_BEFORE - 1) in judged.text
    assert judge(nights([RATE] * (MIN_BEFORE + 1))).verdict == "normal"


def test_a_slowdown_that_is_planted_is_found_on_its_first_night(rng):
    rates = noisy(rng, 12)
    rates[-1] *= 0.8
    judged = judge(nights(rates))
    assert judged.verdict == "regression"
    (change,) = judged.changes
    assert (change.measure, change.num_runs, change.num_before) == ("throughput", 1, 11)
    assert change.value == pytest.approx(800, rel=0.05)
    assert change.value < change.limit < change.expected == pytest.approx(RATE, rel=0.02)
    assert "samples/s" in judged.text


def test_a_small_slowdown_needs_three_nights_and_a_smaller_one_is_none(rng):
    rates = noisy(rng, 40, 0.005)
    rates[30:] *= 0.94
    assert first_alarm(rates) in (31, 32)
    rates[30:] *= 0.97 / 0.94
    assert first_alarm(rates) is None


def test_a_slow_decay_is_found(rng):
    rates = noisy(rng, 60, 0.005)
    rates[20:] *= 0.995 ** np.arange(40)
    alarm = first_alarm(rates)
    assert alarm is not None
    assert rates[alarm] > 0.8 * RATE


def test_thirty_nights_of_ordinary_noise_give_no_alarm():
    """Of 2 % standard deviation, normal and with heavy tails; the log has the rates for more kinds of noise."""
    rng = np.random.default_rng(7)
    for draw in (rng.standard_normal, lambda number: rng.standard_t(5, number) * 0.77):
        alarms = [first_alarm(RATE * np.exp(0.02 * draw(30))) is not None for _ in range(25)]
        assert sum(alarms) <= 1


def test_a_night_of_bad_luck_is_no_measure_and_none_after_it_is_called_worse(rng):
    runs = nights(noisy(rng, 12))
    bad = night(500.0, contaminated=True)
    judged = judge([*runs, bad])
    assert (judged.verdict, judged.tag) == ("disturbed", "disturbed")
    assert "others used the machine" in judged.text
    assert judge([*runs, bad, bad, bad, *nights([RATE])]).verdict == "normal"


def test_a_regression_lasts_until_it_is_mended(rng):
    runs = nights(noisy(rng, 12))
    slow = nights([700.0] * 20, regressed=True)
    judged = judge([*runs, *slow, *nights([700.0])])
    assert judged.verdict == "regression", "regressed nights are no measure, or one would get used to them"
    assert judge([*runs, *slow, *nights([RATE])]).verdict == "normal"


def test_accuracy_and_waiting_are_judged_too():
    def run(accuracy, wait):
        return night(RATE, score=accuracy, data_wait=wait)

    runs = [run(0.95, 0.02)] * 8
    judged = judge([*runs, run(0.90, 0.30)])
    assert [change.name for change in judged.changes] == ["accuracy", "data wait"]
    assert "5.0 points below the 95.0%" in judged.text
    assert "28.0 points above the 2.0%" in judged.text
    assert judge([*runs, run(0.97, 0.0)]).verdict == "normal", "better is no regression"
    assert judge([*runs, run(0.95 - 0.015, 0.02)]).verdict == "normal"
    assert judge([*runs, run(0.95 - 0.015, 0.02)], Tolerances(score=0.005)).verdict == "regression"


def test_the_item_that_grew_is_named_and_raw_throughput_is_shown():
    items = {"data_wait": 1e-5, "forward": 4e-4, "backward": 6e-4}
    runs = nights([RATE] * 8, item_seconds=items)
    judged = judge([*runs, night(700.0, baseline_throughput=505.0, item_seconds=items | {"data_wait": 4.4e-4})])
    assert judged.grew == "data_wait"
    assert "to 440 us a sample" in judged.text
    assert "raw throughput 700 samples/s, -30% against the median of these runs; the baseline changed by +1%" in (
        judged.text
    )


def test_a_slower_machine_is_no_regression():
    runs = nights([RATE] * 8)
    judged = judge([*runs, night(0.7 * RATE, baseline_throughput=0.7 * CONTROL)])
    assert judged.verdict == "normal"
    assert "raw throughput 700 samples/s, -30% against the median of these runs; the baseline changed by -30%" in (
        judged.text
    )
    judged = judge([*runs, night(0.6 * RATE, baseline_throughput=0.7 * CONTROL)])
    (change,) = judged.changes
    assert change.value == pytest.approx(600)
    assert change.expected == pytest.approx(700), "at tonight's speed of the machine"
    assert change.ratio == pytest.approx(600 / 350)
    assert change.expected_ratio == pytest.approx(2)


def test_a_score_has_its_own_name():
    runs = nights([RATE] * 8, score=0.95)
    judged = judge([*runs, night(RATE, score=0.9)], score="mean_iou")
    assert judged.tag == "mean IoU"
    assert judged.text.startswith("mean IoU 90.0%, 5.0 points below the 95.0% of the 8 runs before")


def test_a_disturbed_run_is_judged_by_its_accuracy_alone():
    runs = nights([RATE] * 8, score=0.95)
    judged = judge([*runs, night(400.0, score=0.9, contaminated=True)])
    assert (judged.verdict, judged.tag) == ("regression", "accuracy")


def test_others_disturb_a_run_where_there_are_more_of_them_than_usual():
    runs = nights([RATE] * 8, foreign_cores=0.6)
    assert judge([*runs, night(400.0, foreign_cores=0.8)]).verdict == "regression", "a server that is always there"
    assert judge([*runs, night(400.0, foreign_cores=0.9)]).verdict == "disturbed"
    assert judge([*nights([RATE] * 8), night(400.0, foreign_cores=0.3)]).verdict == "disturbed"


def test_what_is_not_known_is_not_called_normal():
    runs = nights([RATE] * 8)
    assert judge([*runs, RunMetrics(run_id="now")]).verdict == "too few runs"
    assert judge([*runs, night(float("nan"))]).verdict == "too few runs"
    judged = judge([*runs, night(RATE, score=0.5)])
    assert judged.text == "throughput as in the 8 runs before it"


def test_without_a_control_throughput_is_not_judged():
    runs = nights([RATE] * 8, score=0.9, baseline_throughput=None)
    judged = judge([*runs, night(400.0, score=0.9)])
    assert judged.verdict == "normal"
    assert not judged.changes
    assert (
        "throughput is not judged: 0 of the 8 runs before it have timed their baseline; from 6 on it is" in judged.text
    )
    judged = judge([*nights([RATE] * 8, score=0.9), night(400.0, score=0.9, baseline_throughput=None)])
    assert "throughput is not judged: the run has timed no undisturbed baseline" in judged.text
    assert not judged.changes


def test_a_series_with_a_gap_of_a_month_begins_again():
    runs = [run.model_copy(update={"start_time": number * DAY}) for number, run in enumerate(nights([RATE] * 12))]
    later = night(400.0, start_time=11 * DAY + (MAX_GAP_DAYS + 1) * DAY)
    judged = judge([*runs, later])
    assert (judged.verdict, judged.changes) == ("too few runs", ())
    assert judged.text == "after 32 days without a run the history starts again: 0 runs since; from 6 on it is judged"
    assert judge([*runs, later.model_copy(update={"start_time": 13 * DAY})]).verdict == "regression"


def test_on_a_host_never_seen_before_only_the_score_is_judged():
    runs = nights([RATE] * 8, host="a", score=0.9, data_wait=0.0)
    judged = judge([*runs, night(400.0, host="b", score=0.9, data_wait=0.5)])
    assert (judged.verdict, judged.changes) == ("normal", ())
    assert "throughput and data wait are not judged: the runs before it were not on b" in judged.text
    assert "samples/s" not in judged.text, "rates of other hosts say nothing of this one"
    assert judge([*runs, night(400.0, host="b", score=0.5)]).tag == "accuracy"


def test_the_effect_of_a_host_is_drawn_to_the_level_by_its_number_of_runs(rng):
    hosts = [f"host{number % 6}" for number in range(60)]
    effects = dict(zip(sorted(set(hosts)), rng.normal(0, 0.05, 6), strict=True))
    level = level_of([(host, effects[host] + rng.normal(0, 0.01)) for host in hosts] + [("rare", 0.3)])
    assert level.noise == pytest.approx(0.01, rel=0.4)
    assert level.host_spread == pytest.approx(0.05, rel=0.8)
    assert level.expect("host0") == pytest.approx(effects["host0"], abs=0.01)
    assert level.common < level.expect("rare") < 0.3
    assert level.expect("unknown") == level.common
    assert level.reach(["host0"]) < level.reach(["rare"]) < level.reach(["unknown"])
    alike = level_of([(host, rng.normal(0, 0.01)) for host in hosts])
    assert alike.reach(["host0"]) < 0.08


def test_ordinary_nights_give_no_alarm_and_planted_losses_are_found():
    """A short form of `tests/benchmarks/simulate_nights.py`: half a year, and twenty losses of each kind."""
    rng = np.random.default_rng(25)
    assert alarms(ordinary_series(rng, 183)) == []
    first = third = 0
    for _ in range(20):
        at = int(rng.integers(70, 80))
        first += at in alarms(slowed(ordinary_series(rng, at + 1), at, 0.10), at)
        third += bool(alarms(slowed(ordinary_series(rng, at + 3), at, 0.05), at))
    assert first >= 18
    assert third >= 16
