import re

import pytest
from matplotlib.figure import Figure

from paceline.tasks.formatting import format_seconds
from paceline.tasks.report.plotting import png_bytes, svg_text
from paceline.tasks.report.run_report import draw_speed, draw_speedup, draw_time_budget, draw_training
from paceline.tasks.report.summary import budget_items
from paceline.tasks.speedup.records import SpeedupResult


def test_all_pictures_of_a_run(report):
    figures = draw_speed(report.speedup, report.train, report.summary["time_budget"])
    assert list(figures) == ["speedup", "training", "time_budget"]
    for name, figure in figures.items():
        assert isinstance(figure, Figure)
        assert png_bytes(figure).startswith(b"\x89PNG")
        assert svg_text(figure, name).startswith("<svg ")


def test_what_is_unknown_is_not_drawn():
    assert draw_speedup(SpeedupResult(), ()) is None
    assert draw_training((), 0, ()) is None
    assert draw_time_budget({}) is None


@pytest.mark.parametrize("losses", [(1.0,), (1.0, 0.9), tuple(1 / (n + 1) for n in range(5000))])
def test_any_length_of_training(losses):
    assert png_bytes(draw_training(losses, 7, ()))
    assert png_bytes(draw_training(losses, 7, (0.5,) * 100))


def test_ratio_without_interval_is_drawn():
    assert png_bytes(draw_speedup(SpeedupResult(ratio=1.2), (1.2,)))


def test_budget_is_sorted_and_loses_nothing():
    budget = {"a": 5.0, "b": 100.0, "c": 0.001, "d": 0.002}
    items = budget_items(budget)
    assert [item[0] for item in items] == ["b", "a", "2 tiny items"]
    assert sum(item[1] for item in items) == pytest.approx(sum(budget.values()))
    assert sum(item[2] for item in items) == pytest.approx(1.0)
    assert budget_items({"only": 0.0}) == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0004, "0.4 ms"), (0.25, "0.2 s"), (12.34, "12.3 s"), (99.96, "1 min 40 s"), (245, "4 min 05 s")],
)
def test_seconds_for_people(seconds, text):
    assert format_seconds(seconds) == text
    assert format_seconds(7800) == "2 h 10 min"
    assert format_seconds(3599.9) == "1 h 00 min"


def test_svg_is_the_same_every_time_and_safe(report):
    first, second = (
        svg_text(draw_speed(report.speedup, report.train, {})["training"], 'a "<b>" & c') for _ in range(2)
    )
    assert first == second
    assert "<b>" not in first
    assert "var(--ink" in first
    ids = re.findall(r' id="([^"]+)"', first)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="|url\()#([\w-]+)', first)) == set(ids)
