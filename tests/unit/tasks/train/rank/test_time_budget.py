import time

import pytest

from paceline.tasks.train.rank.time_budget import Stopwatch


def test_items_add_up_to_the_wall_time():
    started = time.monotonic()
    watch = Stopwatch("startup", started)
    for _ in range(20):
        watch.switch("step")
        with watch.during("logging"):
            sum(range(20_000))
        watch.switch("loop")
    budget = watch.budget()
    assert set(budget) == {"startup", "step", "logging", "loop"}
    assert sum(budget.values()) == pytest.approx(time.monotonic() - started, abs=0.01)


def test_an_interrupted_item_goes_on_after_an_error():
    watch = Stopwatch("outer")
    with pytest.raises(ValueError, match="x"), watch.during("inner"):
        raise ValueError("x")
    assert watch.switch("next") == "outer"


def test_time_before_the_stopwatch_existed_counts():
    assert Stopwatch("startup", time.monotonic() - 5.0).budget()["startup"] == pytest.approx(5.0, abs=0.5)
