"""The report of a sweep, from trials whose figures are known."""

import re

import pytest

from paceline.conf.lightning import Objective
from paceline.tasks.formatting import DASH
from paceline.tasks.measure.paired_ratio import Interval
from paceline.tasks.report.plotting import png_bytes
from paceline.tasks.report.sweep_report import (
    draw_sweep,
    render_sweep,
    sweep_notes,
    sweep_table,
    timeline_rows,
    trial_line,
)
from paceline.tasks.sweep.concurrency import Colocation
from tests.support.sweeps import five_trials, result_of, trial


def colocation(alone=(1.9, 1.8, 2.0), together=(1.3, 1.2, 1.4), whole=(1.2, 1.1, 1.3), **fields):
    alone, together, whole = (
        None if ends is None else Interval(value=ends[0], low=ends[1], high=ends[2])
        for ends in (alone, together, whole)
    )
    return Colocation(
        **{"num_devices": 2, "num_rounds": 12, "seconds": 20.0, "contaminated": False} | fields,
        over_alone=alone,
        over_together=together,
        over_whole=whole,
    )


def test_the_best_is_the_highest_that_was_done_and_of_equals_the_first():
    assert result_of(five_trials()).best.number == 3
    pruned = trial(5, 0.2, "sgd", "pruned", scores=(0.99,))
    equal = trial(6, 0.2, "sgd", scores=(0.9,))
    assert result_of((*five_trials(), pruned, equal)).best.number == 3
    assert result_of(()).best is None


def test_the_best_is_given_as_a_command():
    notes = sweep_notes(result_of(five_trials()))
    assert "`paceline run digits recipe.learning_rate=0.1 recipe.optimizer=adamw`" in notes[0]
    assert "90.00% on the validation split" in notes[1]
    assert "89.00% on the test split" in notes[1]
    assert any("trial 1, training diverged" in note for note in notes)


def test_an_end_of_a_range_is_told():
    notes = sweep_notes(result_of((trial(0, 0.95, "sgd"),)))
    assert any("recipe.learning_rate=0.95 lies at an end" in note for note in notes)
    assert not any("lies at an end" in note for note in sweep_notes(result_of((trial(0, 0.1, "sgd"),))))


def test_places_that_were_taken_and_breaks_of_a_sweep_that_went_on():
    early = [trial(0, 0.1, "sgd", begin=0, seconds=10), trial(1, 0.1, "sgd", begin=0, seconds=6)]
    late = [trial(2, 0.1, "sgd", begin=1000, seconds=4)]
    result = result_of((*early, *late))
    assert result.busy_seconds == pytest.approx(14)
    assert result.occupancy == pytest.approx(20 / 28)
    assert timeline_rows([*early, *late]) == [0, 1, 0]


def test_the_sweeps_speedup_is_that_of_its_steps_in_the_places_that_were_taken():
    trials = (trial(0, 0.1, "sgd", begin=0, seconds=10), trial(1, 0.1, "sgd", begin=0, seconds=5))
    result = result_of(trials, colocation=colocation())
    assert result.speedup.value == pytest.approx(1.9 * 0.75)
    assert (result.speedup.low, result.speedup.high) == pytest.approx((1.8 * 0.75, 2.0 * 0.75))
    assert result_of(trials, no_colocation="one trial runs at a time").speedup is None


@pytest.mark.parametrize(
    ("together", "whole", "layout"),
    [
        ((1.3, 1.2, 1.4), (1.2, 1.1, 1.3), "one model per device"),
        ((1.3, 1.2, 1.4), (1.01, 0.9, 1.1), "no certain difference"),
        ((1.3, 1.2, 1.4), (0.8, 0.7, 0.9), "one model on all devices"),
        ((0.8, 0.7, 0.9), None, "one model on all devices"),
        ((1.3, None, None), None, "no certain difference"),
    ],
)
def test_which_layout_is_better_goes_by_the_best_way_to_use_all_devices(together, whole, layout):
    found = colocation(together=together, whole=whole)
    assert found.layout == layout
    notes = " ".join(sweep_notes(result_of(five_trials(), colocation=found)))
    assert layout.replace("no certain", "no measurable").split(" ", 1)[1].removesuffix(" difference") in notes


def test_a_measurement_beside_others_is_not_to_be_trusted():
    seen = colocation(contaminated=True, reasons=("1.2 cores were busy with other work",))
    assert "do not trust it" in " ".join(sweep_notes(result_of(five_trials(), colocation=seen)))


def test_the_page_answers_in_the_order_that_was_asked():
    page = render_sweep(result_of(five_trials(), colocation=colocation()), {"commit": "abc"})
    assert re.findall(r"<h2>(.*?)</h2>", page) == [
        "Which settings are best?",
        "What did each setting do?",
        "Every trial",
        "What did several at once give?",
    ]
    assert page.count("<svg") == 5
    assert "90.00%" in page
    assert "script" not in page.replace("script-src", "")


def test_a_sweep_without_a_trial_that_was_done_has_a_page_too():
    failed = result_of((trial(0, 0.1, "sgd", "failed", scores=(), error="lost <it>"),), no_colocation="no time")
    page = render_sweep(failed, {})
    assert "no trial was done" in page
    assert "lost &lt;it&gt;" in page


def test_every_trial_has_a_row():
    head, rows = sweep_table(result_of(five_trials()))
    assert head[:4] == ["trial", "learning_rate", "optimizer", "score"]
    assert [row[-1] for row in rows] == ["", "failed", "pruned", "best", ""]


def test_pictures_are_png_and_named_after_their_settings():
    figures = draw_sweep(result_of(five_trials()))
    assert set(figures) == {"scores", "courses", "over-recipe.learning_rate", "over-recipe.optimizer", "timeline"}
    assert all(png_bytes(figure, 40).startswith(b"\x89PNG") for figure in figures.values())


def test_a_loss_of_own_code_is_best_where_it_is_smallest():
    trials = (trial(0, 0.01, "sgd", scores=(2.345678,)), trial(1, 0.1, "sgd", scores=(1.5,)))
    result = result_of(trials, score_name="val_loss", objective=Objective(name="val_loss", goal="minimize"))
    assert result.best.number == 1
    _, rows = sweep_table(result)
    assert [row[-4:-2] for row in rows] == [["2.346", DASH], ["1.5", DASH]]
    assert trial_line(trials[1], "val_loss").startswith("1.5, ")
    assert "As your module logged it last." in render_sweep(result, {})
