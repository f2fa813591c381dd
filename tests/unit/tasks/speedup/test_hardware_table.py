import math

import numpy as np
import pytest

from paceline.tasks.report.tables import draw_hardware, hardware_notes, hardware_rows, render_hardware
from paceline.tasks.speedup.hardware_table import HardwareRun, ratio_interval, tabulate

FACTS = {
    "data.source": "cifar10",
    "model.name": "convblocks",
    "recipe.num_epochs": "60",
    "global_batch_size": "256",
    "seed": "1",
    "code": "c",
    "versions": "python 3.11.7, torch 2.13.0+cpu",
    "execution.precision": "32-true",
    "device": "Xeon",
}


def run(rate, device="Xeon", *, facts=None, **fields):
    found = {
        "run_id": "r",
        "num_devices": 1,
        "execution": "32-true, off",
        "fixed_seconds": 5.0,
        "peak_memory_bytes": 2.0**30,
        "joules_per_sample": None,
        "price_per_device_hour": None,
    }
    return HardwareRun(facts=FACTS | {"device": device} | (facts or {}), samples_per_second=rate, **(found | fields))


def test_hardware_that_did_the_same_work_is_divided_by_the_slowest():
    gpu = {"versions": "python 3.11.7, torch 2.13.0+cu130", "execution.precision": "bf16-mixed"}
    found = tabulate([run(100.0), run(2000.0, "H200", facts=gpu), run(180.0, num_devices=2)], {}, {})
    (work,) = found.tables
    assert [row.label for row in work.rows] == ["1 x Xeon", "2 x Xeon", "1 x H200"]
    assert [row.speedup for row in work.rows] == [1.0, 1.8, 20.0]
    assert [row.low for row in work.rows] == [None, None, None]
    assert "20.00" in render_hardware(found)
    assert set(draw_hardware(work)) == {"speedups"}


@pytest.mark.parametrize("differing", [{"seed": "2"}, {"code": "d"}, {"versions": "python 3.11.7, torch 2.14.0"}])
def test_other_work_is_in_another_table(differing):
    found = tabulate([run(100.0), run(300.0, "H200", facts=differing)], {}, {})
    assert [len(work.rows) for work in found.tables] == [1, 1]
    assert found.tables[0].work != found.tables[1].work, "what sets them apart is told"
    assert draw_hardware(found.tables[0]) == {}


def test_of_several_executions_the_fastest_stands_for_the_hardware():
    runs = [run(rate, execution="bf16") for rate in (150.0, 160.0, 170.0)] + [run(500.0, execution="lucky")]
    runs = [*runs[:3], run(90.0), run(40.0, "Old")]
    row = tabulate(runs, {}, {}).tables[0].rows[1]
    assert (row.execution, row.samples_per_second, row.num_runs) == ("bf16", 160.0, 3)


def test_the_interval_covers_the_true_ratio():
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(400):
        sides = [
            [run(rate * math.exp(noise)) for noise in rng.normal(0, spread, number)]
            for rate, spread, number in ((300.0, 0.02, 5), (100.0, 0.05, 4))
        ]
        low, high = ratio_interval(*sides)
        covered += low < 3.0 < high
    assert 0.91 < covered / 400 < 0.99


def test_one_run_has_no_interval():
    assert ratio_interval([run(1.0)], [run(2.0), run(3.0)]) == (None, None)


def test_the_size_from_which_the_faster_hardware_is_done_sooner():
    slow, fast = run(100.0, fixed_seconds=4.0), run(1000.0, "H200", fixed_seconds=13.0)
    (one,) = tabulate([slow, fast], {}, {}).tables[0].break_evens
    assert (one.by, one.small, one.large) == ("time", "1 x Xeon", "1 x H200")
    size = one.num_samples
    assert size == pytest.approx(1000.0)
    assert 4.0 + size / 100.0 == pytest.approx(13.0 + size / 1000.0)


def test_what_starts_sooner_and_runs_faster_is_better_at_any_size():
    (one,) = tabulate([run(100.0), run(1000.0, "H200", fixed_seconds=3.0)], {}, {}).tables[0].break_evens
    assert one.num_samples == 0
    assert one.sentence == "1 x H200 is done sooner than 1 x Xeon at any size."


def test_prices_are_those_given_before_those_recorded_and_may_turn_the_order_around():
    slow = run(100.0, price_per_device_hour=0.36)
    fast = run(1000.0, "NVIDIA H200", price_per_device_hour=99.0)
    work = tabulate([slow, fast], {}, {"h200": 7.2}).tables[0]
    assert [row.price_per_million_samples for row in work.rows] == pytest.approx([1.0, 2.0])
    price = next(one for one in work.break_evens if one.by == "price")
    assert (price.large, price.num_samples) == ("1 x Xeon", 0), "cheaper to start and cheaper to run"
    assert "2.000 per million" in hardware_rows(work)[1]


def test_what_is_left_out_is_told():
    found = tabulate([run(1.0)], {"disturbed by other work": 2}, {})
    assert "Left out: 2 disturbed by other work." in hardware_notes(found)
