"""A run among those before it: what is found, what is left alone, and how often ordinary noise is called a change."""

import numpy as np
import pytest

from paceline.tasks.speedup.regression import MIN_BEFORE, RunMetrics, Tolerances, judge, scale_qn

RATE = 1000.0


def nights(rates, **figures):
    """Runs by their throughput, the oldest first."""
    return [RunMetrics(run_id=str(number), throughput=rate, **figures) for number, rate in enumerate(rates)]


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
    rates[30:] *= 0.92
    assert first_alarm(rates) in (31, 32)
    rates[30:] *= 0.97 / 0.92
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
    bad = RunMetrics(run_id="bad", throughput=500.0, contaminated=True)
    judged = judge([*runs, bad])
    assert (judged.verdict, judged.tag) == ("disturbed", "disturbed")
    assert "others used the machine" in judged.text
    assert judge([*runs, bad, bad, bad, *nights([RATE])]).verdict == "normal"


def test_a_regression_lasts_until_it_is_mended(rng):
    runs = nights(noisy(rng, 12))
    slow = [RunMetrics(run_id=f"slow {number}", throughput=700.0, regressed=True) for number in range(20)]
    judged = judge([*runs, *slow, *nights([700.0])])
    assert judged.verdict == "regression", "regressed nights are no measure, or one would get used to them"
    assert judge([*runs, *slow, *nights([RATE])]).verdict == "normal"


def test_accuracy_and_waiting_are_judged_too():
    def run(accuracy, wait):
        return RunMetrics(run_id="", throughput=RATE, score=accuracy, data_wait=wait)

    runs = [run(0.95, 0.02)] * 8
    judged = judge([*runs, run(0.90, 0.30)])
    assert [change.name for change in judged.changes] == ["accuracy", "data wait"]
    assert "5.0 points below the 95.0%" in judged.text
    assert "28.0 points above the 2.0%" in judged.text
    assert judge([*runs, run(0.97, 0.0)]).verdict == "normal", "better is no regression"
    assert judge([*runs, run(0.95 - 0.015, 0.02)]).verdict == "normal"
    assert judge([*runs, run(0.95 - 0.015, 0.02)], Tolerances(score=0.005)).verdict == "regression"


def test_the_item_that_grew_is_named_and_so_is_the_machine():
    items = {"data_wait": 1e-5, "forward": 4e-4, "backward": 6e-4}
    runs = nights([RATE] * 8, item_seconds=items, baseline_throughput=500.0)
    slow = {"throughput": 700.0, "item_seconds": items | {"data_wait": 4.4e-4}}
    judged = judge([*runs, RunMetrics(run_id="now", baseline_throughput=505.0, **slow)])
    assert judged.grew == "data_wait"
    assert "data wait grew from 10 us to 440 us a sample" in judged.text
    assert "the baseline changed by +1%: look at the execution first" in judged.text
    judged = judge([*runs, RunMetrics(run_id="now", baseline_throughput=360.0, **slow)])
    assert "the baseline changed by -28% as well: look at the machine first" in judged.text


def test_a_score_has_its_own_name():
    runs = nights([RATE] * 8, score=0.95)
    judged = judge([*runs, RunMetrics(run_id="now", throughput=RATE, score=0.9)], score_name="mean_iou")
    assert judged.tag == "mean IoU"
    assert judged.text.startswith("mean IoU 90.0%, 5.0 points below the 95.0% of the 8 runs before")


def test_a_disturbed_run_is_judged_by_its_accuracy_alone():
    runs = nights([RATE] * 8, score=0.95)
    judged = judge([*runs, RunMetrics(run_id="now", throughput=400.0, score=0.9, contaminated=True)])
    assert (judged.verdict, judged.tag) == ("regression", "accuracy")


def test_others_disturb_a_run_where_there_are_more_of_them_than_usual():
    runs = nights([RATE] * 8, foreign_cores=0.6)
    slow = {"run_id": "now", "throughput": 400.0}
    assert judge([*runs, RunMetrics(**slow, foreign_cores=0.8)]).verdict == "regression", (
        "a server that is always there"
    )
    assert judge([*runs, RunMetrics(**slow, foreign_cores=0.9)]).verdict == "disturbed"
    assert judge([*nights([RATE] * 8), RunMetrics(**slow, foreign_cores=0.3)]).verdict == "disturbed"


def test_what_is_not_known_is_not_called_normal():
    runs = nights([RATE] * 8)
    assert judge([*runs, RunMetrics(run_id="now")]).verdict == "too few runs"
    assert judge([*runs, RunMetrics(run_id="now", throughput=float("nan"))]).verdict == "too few runs"
    judged = judge([*runs, RunMetrics(run_id="now", throughput=RATE, score=0.5)])
    assert judged.text == "throughput as in the 8 runs before it"
