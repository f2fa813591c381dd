"""Rules for the pages of all reports: text is escaped, no script runs, nothing comes from outside."""

from dataclasses import replace
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from paceline.tasks.report import page as pages
from paceline.tasks.report.forecast_report import render_advise
from paceline.tasks.report.no_gpu_report import render_no_gpu
from paceline.tasks.report.run_report import render_report
from paceline.tasks.report.study_report import render_study
from paceline.tasks.report.sweep_report import render_sweep
from paceline.tasks.report.tables import render_compare, render_hardware
from tests.support.reports import make_probe, make_report
from tests.support.studies import PRECISION
from tests.support.sweeps import five_trials
from tests.support.sweeps import result_of as sweep_of
from tests.unit.tasks.report import test_study_report
from tests.unit.tasks.speedup import test_compare, test_hardware_table
from tests.unit.tasks.speedup.study import test_no_gpu

EVIL = "<script>alert(1)</script>"
EVIL_ENVIRONMENT = {"commit": EVIL}


def run_page():
    report = make_report(make_probe(), class_names=(EVIL, "other"))
    summary = {**report.summary, "experiment": EVIL}
    config = report.config.model_copy(update={"name": EVIL})
    return render_report(replace(report, config=config, summary=summary, environment=EVIL_ENVIRONMENT))


def study_page():
    arms, runs = test_study_report.study([PRECISION], test_study_report.faster_in_bf16)
    failed = runs[-1].model_copy(update={"status": "failed", "error": EVIL})
    result = test_study_report.result_of(arms, [*runs[:-1], failed], experiment=EVIL, preset=EVIL)
    return render_study(result, EVIL_ENVIRONMENT)


def sweep_page():
    first, second, *others = five_trials()
    trials = (first, second.model_copy(update={"error": EVIL}), *others)
    return render_sweep(sweep_of(trials, experiment=EVIL, preset=EVIL, no_colocation=EVIL), EVIL_ENVIRONMENT)


def no_gpu_page():
    result = test_no_gpu.result_of(test_no_gpu.runs_of())
    return render_no_gpu(result.model_copy(update={"experiment": EVIL, "verdict": EVIL}), EVIL_ENVIRONMENT)


def forecast_page():
    return render_advise(test_study_report.advice(experiment=EVIL, preset=EVIL), [])


def hardware_page():
    runs = [test_hardware_table.run(100.0, EVIL), test_hardware_table.run(300.0, "H200")]
    return render_hardware(test_hardware_table.tabulate(runs, {EVIL: 2}, {}))


def compare_page():
    runs = [test_compare.run(run_id, 100.0).model_copy(update={"name": EVIL}) for run_id in ("a", "b")]
    return render_compare(test_compare.compare(runs))


@pytest.fixture(
    params=[run_page, study_page, sweep_page, no_gpu_page, forecast_page, hardware_page, compare_page],
    ids=lambda render: render.__name__,
)
def page(request):
    return request.param()


def test_names_and_errors_are_escaped(page):
    assert EVIL not in page
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_the_policy_forbids_scripts_and_everything_from_outside(page):
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    head, body = page.split("<body>")
    assert f'<meta http-equiv="Content-Security-Policy" content="{policy}">' in head
    assert head.index("Content-Security-Policy") < head.index("<style>")
    assert page.count("<style>") == 1
    assert "prefers-color-scheme:dark" in head, "the stylesheet is part of the page"
    assert not any(f"<{tag}" in body for tag in ("link", "img", "iframe", "form"))


def test_a_name_that_a_template_does_not_get_is_an_error():
    with pytest.raises(UndefinedError):
        pages.render_page("sweep", {})


def test_every_template_belongs_to_a_report():
    names = {path.name for path in (Path(pages.__file__).parent / "templates").iterdir()}
    assert names == {
        "layout.html.j2",
        "parts.html.j2",
        "report.css",
        *(f"{name}.html.j2" for name in ("run", "study", "sweep", "no_gpu", "forecast", "hardware")),
        *(f"{name}.html.j2" for name in ("compare", "judgement")),
    }
