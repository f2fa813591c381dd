import pytest

from paceline.tasks.report.tables import draw_compare, render_compare
from paceline.tasks.speedup.compare import ComparedRun, compare, compare_notes, compare_table

FACTS = {"seed": "1", "data": "d", "code": "c", "execution.precision": "32-true", "model.name": "convblocks"}


def run(run_id, rate=100.0, *, facts=None, metrics=None, **fields):
    found = {"throughput/steady_samples_per_second": rate, "time/wall_seconds": 1000 / rate, "test/accuracy": 0.9}
    return ComparedRun(
        run_id=run_id,
        name="digits",
        start_time=0.0,
        facts=FACTS | (facts or {}),
        metrics=found | (metrics or {}),
        **({"status": "FINISHED"} | fields),
    )


def test_runs_of_the_same_work_are_divided_by_the_first():
    faster = run("b", 250.0, facts={"execution.precision": "bf16-mixed"}, metrics={"test/accuracy": 0.89})
    base, row = compare([run("a"), faster]).runs
    assert base.is_base
    assert base.ratio is None
    assert row.ratio == pytest.approx(2.5)
    assert row.wall_ratio == pytest.approx(2.5)
    assert row.accuracy_difference == pytest.approx(-0.01)
    assert row.rate == "throughput/steady_samples_per_second"


def test_runs_are_compared_by_the_score_that_they_have():
    def segmented(run_id, score, **fields):
        found = run(run_id, **fields)
        return found.model_copy(update={"metrics": found.metrics | {"test/accuracy": 0.99, "test/mean_iou": score}})

    first, second = segmented("a", 0.9), segmented("b", 0.88, facts={"execution.precision": "bf16-mixed"})
    comparison = compare([first, second])
    head, (_, cells) = compare_table(comparison)
    assert (head[3], cells[3]) == ("mean IoU", "88.00% (-2.00 points)")
    assert comparison.runs[1].accuracy_difference is None
    head, (cells, _) = compare_table(compare([first, run("b")]))
    assert (head[3], cells[3]) == ("score", "mean IoU 90.00%")


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (run("b", facts={"seed": "2"}), "not comparable: seed"),
        (run("b", facts={"seed": "2", "data": "e", "code": "d", "model.name": "x"}), "seed, data, code and 1 more"),
        (ComparedRun(run_id="b", name="study", status="FINISHED", start_time=0.0), "nothing is known of one of them"),
        (run("b", tags={"paceline.contaminated": "True"}), "digits b was disturbed"),
        (run("b", tags={"paceline.contaminated": "None", "paceline.disturbed": "True"}), "digits b was disturbed"),
        (run("b", status="FAILED"), "digits b did not finish"),
        (run("b", rate=0.001).model_copy(update={"metrics": {}}), "no throughput is known of both"),
    ],
)
def test_without_a_match_or_an_undisturbed_measurement_there_is_no_number_anywhere(second, reason):
    comparison = compare([run("a"), second])
    row = comparison.runs[1]
    assert reason in row.why_no_ratio
    assert (row.ratio, row.wall_ratio, row.accuracy_difference) == (None, None, None)
    assert " x" not in compare_table(comparison)[1][1][1]
    assert draw_compare(comparison) == {}
    assert "one run each and have no interval" not in " ".join(compare_notes(comparison))
    assert reason in render_compare(comparison)


def test_a_contaminated_run_is_nobodys_base():
    comparison = compare([run("a", tags={"paceline.contaminated": "True"}), run("b", 200.0)])
    assert comparison.runs[1].ratio is None


def test_without_a_steady_state_in_both_the_whole_training_is_divided():
    short = {"throughput/samples_per_second": 50.0}
    first, second = (
        run(name).model_copy(update={"metrics": metrics})
        for name, metrics in (("a", short | {"throughput/steady_samples_per_second": 80.0}), ("b", short))
    )
    row = compare([first, second]).runs[1]
    assert row.rate == "throughput/samples_per_second"
    assert row.ratio == 1.0


def test_the_page_shows_what_differs_and_escapes_it():
    second = run("b", 250.0, facts={"execution.precision": "<b>bf16</b>"}, metrics={"speedup/ratio": 2.0})
    page = render_compare(compare([run("a"), second]))
    assert "<b>bf16" not in page
    assert "&lt;b&gt;bf16" in page
    assert "execution.precision" in page
    assert "<svg" in page
    assert "2.50 x" in page
    assert "one run each" in page
