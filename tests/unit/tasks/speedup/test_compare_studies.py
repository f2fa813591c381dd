"""A run over others of the store: the ratio, its interval, and every reason why there is none."""

import math

import numpy as np
import pytest

from paceline.tasks.records.execution import BASELINE
from paceline.tasks.speedup.compare import ComparedRun, is_plain, ratio_across, speedup_across

PLAIN = {
    "execution.num_nodes": "1",
    "execution.num_devices": "1",
    "execution.precision": "32-true",
    "execution.compile": "off",
    "execution.memory_format": "contiguous",
    "execution.loading": "foreground",
}
WORK = {"seed": "1", "data": "d", "code": "c"}
FAST = PLAIN | {"execution.precision": "bf16-mixed", "execution.loading": "resident"}


def run(run_id, rate=100.0, facts=PLAIN, foreign=0.1, **fields):
    return ComparedRun(
        run_id=run_id,
        name="digits",
        start_time=0.0,
        facts=WORK | facts,
        metrics={"throughput/steady_samples_per_second": rate, "machine/foreign_cores": foreign},
        **({"status": "FINISHED"} | fields),
    )


def across(now, *bases):
    return speedup_across(now, bases, 0.5, "fast")


def test_one_run_gives_a_ratio_and_no_interval():
    found = across(run("b" * 8, 250.0, FAST), run("a" * 8, 100.0))
    assert found.ratio == pytest.approx(2.5)
    assert (found.low, found.high, found.significant, found.cause) == (None, None, None, "too few runs")
    assert found.baseline == "run aaaaaaaa: 1 device, 32-true, contiguous, off, foreground"
    assert "no interval: that takes 3 trainings" in found.verdict
    assert found.baseline_runs == ("aaaaaaaa",)
    assert (found.num_blocks, found.efficiency) == (0, None)
    assert found.candidate_samples_per_second == pytest.approx(250)


def test_three_runs_give_students_interval():
    found = across(run("b", 200.0, FAST), run("a1", 100.0), run("a2", 110.0), run("a3", 90.0))
    logs = np.log([2.0, 200 / 110, 200 / 90])
    reach = 4.302652729911275 * logs.std(ddof=1) * math.sqrt(4 / 3)  # t of 0.975 with 2 degrees of freedom, by table
    assert found.ratio == pytest.approx(math.exp(logs.mean()))
    assert found.low == pytest.approx(math.exp(logs.mean() - reach))
    assert found.high == pytest.approx(math.exp(logs.mean() + reach))
    assert found.significant
    assert found.cause is None
    assert found.baseline_samples_per_second == pytest.approx((100 * 110 * 90) ** (1 / 3))


def test_the_interval_holds_a_further_run_of_the_same_as_often_as_it_says():
    rng = np.random.default_rng(7)
    logs = rng.normal(0.0, 0.03, size=(2000, 5))
    inside = 0
    for now, *bases in logs:
        found = ratio_across(np.exp(now - np.asarray(bases)).tolist())
        inside += found.low <= 1.0 <= found.high
    assert inside / len(logs) == pytest.approx(0.95, abs=0.015)


def test_slower_and_equal_are_told():
    slow = across(run("b", 50.0, FAST), run("a1", 100.0), run("a2", 101.0), run("a3", 99.0))
    assert slow.cause == "slower"
    same = across(run("b", 100.0, FAST), run("a1", 100.0), run("a2", 110.0), run("a3", 90.0))
    assert same.cause == "no measurable difference"


@pytest.mark.parametrize(
    ("now", "base", "why"),
    [
        (run("b", facts=FAST | {"seed": "2"}), run("a"), "run a did other work: seed 1 against 2"),
        (run("b", facts=FAST), run("a", foreign=0.9), "0.90 cores were busy with other work during run a"),
        (run("b", facts=FAST, foreign=0.8), run("a"), "0.80 cores were busy with other work during the training"),
        (run("b", facts=FAST), run("a", status="FAILED"), "digits a did not finish"),
        (run("b", facts=FAST), run("a", tags={"paceline.contaminated": "True"}), "digits a was disturbed"),
    ],
)
def test_what_cannot_be_divided_has_no_number_and_says_why(now, base, why):
    found = across(now, base)
    assert found.ratio is None
    assert found.baseline_runs == ()
    assert found.cause == "not divided"
    assert why in found.verdict


def test_runs_that_cannot_be_used_are_left_out_of_the_mean():
    found = across(run("b", 200.0, FAST), run("a1", 100.0), run("a2", 1.0, foreign=1.5))
    assert found.ratio == pytest.approx(2.0)
    assert found.baseline_runs == ("a1",)


def test_only_what_was_executed_as_the_baseline_is_plain():
    assert is_plain(run("a"), BASELINE)
    for setting, value in (("num_devices", "2"), ("precision", "bf16-mixed"), ("loading", "resident")):
        assert not is_plain(run("a", facts=PLAIN | {f"execution.{setting}": value}), BASELINE)
    assert not is_plain(ComparedRun(run_id="a", name="", status="FINISHED", start_time=0.0), BASELINE)
