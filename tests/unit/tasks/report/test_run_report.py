import html
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import get_args

import pytest

from paceline.tasks.measure.validity import judge
from paceline.tasks.records.execution import BASELINE
from paceline.tasks.records.measurement import AutotuneResult, SlowArm, Validity
from paceline.tasks.records.training import CompileStats
from paceline.tasks.report.quality_charts import draw_quality
from paceline.tasks.report.run_report import render_report
from paceline.tasks.report.summary import summary_table
from paceline.tasks.speedup.advice import next_steps
from paceline.tasks.speedup.limit_share import LimitShare, limit_share
from paceline.tasks.speedup.records import Ratio, SpeedupResult
from paceline.tasks.speedup.verdict import Cause, speedup_result
from tests.support.ladders import Game
from tests.support.reports import CANDIDATE, CLASSES, limited, make_probe, make_report, make_train

VOID = {"meta", "br", "path", "use", "image", "rect"}
QUESTIONS = [
    "How much faster, at 95 % confidence?",
    "Compared with what?",
    "What did each factor add?",
    "Where did the time go?",
    "What limits it?",
    "How near is it to the device's limit?",
    "What to do next",
    "How good is the model?",
    "What data?",
    "Choices made for you",
]


class Checker(HTMLParser):
    """Notes elements and text, and that all that opens closes."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.links, self.titles = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href", "action", "data")]
        self.handlers = [name for name, _ in attrs if name.startswith("on")]
        assert not self.handlers
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "h2":
            self.titles.append(data)


def _check(page):
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert not checker.open
    return checker


def test_report_answers_in_order_and_stands_alone(report):
    page = render_report(replace(report, figures=draw_quality(report.evaluate)))
    checker = _check(page)
    assert checker.titles == QUESTIONS
    assert "script" not in checker.tags
    assert "link" not in checker.tags
    assert all(link.startswith(("#", "data:")) for link in checker.links)
    assert not re.search(r"url\((?!#)|@import", page)
    assert report.speedup.verdict.rstrip(".") in page
    assert "AVX512-BF16" in page


def test_text_is_escaped():
    evil = "<script>alert(1)</script>"
    page = render_report(make_report(make_probe(), class_names=(evil, *CLASSES[1:])))
    assert evil not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "script" not in _check(page).tags


@pytest.mark.parametrize(
    ("ratio", "fields", "badge"),
    [
        (1.5, {}, "faster within this process (95 % CI above 1)"),
        (0.8, {}, "slower within this process (95 % CI below 1)"),
        (1.001, {}, "no measurable difference within this process"),
        (1.5, {"num_rounds": 2}, "too few rounds for an interval"),
        (1.5, {"validity": judge(Validity(foreign_load=0.9, num_cores=2))}, "measured on a busy machine"),
    ],
)
def test_the_badge_says_how_certain_the_speedup_is(ratio, fields, badge):
    assert f">{badge}</span>" in render_report(make_report(make_probe(ratio, **fields)))


def test_the_badge_of_an_interval_across_starts_names_no_process(report):
    across = report.speedup.model_copy(update={"significant": True, "scope": "across starts"})
    assert ">faster (95 % CI above 1)</span>" in render_report(replace(report, speedup=across))


def test_the_badge_of_a_ratio_over_the_competent_loop_is_of_one_process(report):
    ratios = report.speedup.ratios | {"competent": Ratio(value=1.14, low=1.05, high=1.2, meaning="as measured")}
    shown = {"significant": True, "scope": "across starts", "ratios": ratios, "headline": "competent"}
    page = render_report(replace(report, speedup=report.speedup.model_copy(update=shown)))
    assert ">faster within this process (95 % CI above 1)</span>" in page


def test_credentials_are_not_shown(report):
    page = render_report(report)
    assert "secret" not in page
    assert "http://***@tracking.example:5000" in page


def test_waits_for_data_that_were_not_measured_are_said_to_be_so(report):
    page = render_report(replace(report, train=report.train.model_copy(update={"data_wait_fraction": None})))
    assert "not measured" in page[page.index("Waiting for data") :][:80]


def test_report_without_any_speedup():
    page = render_report(make_report(None))
    assert _check(page).titles == QUESTIONS
    assert "speedup not measured" in page
    assert "speedup.baseline=probe" in page


def test_report_without_evaluation_and_with_bare_summary(report):
    page = render_report(replace(report, evaluate=None, summary={}, environment={}))
    assert _check(page).titles == QUESTIONS
    assert "Not evaluated" in page


def test_report_of_many_classes_and_few_rounds():
    names = tuple(f"class {number}" for number in range(100))
    page = render_report(make_report(make_probe(num_rounds=2), class_names=names))
    assert "The 20 worst of 100 classes" in page
    assert "too few rounds" in page


def test_same_input_same_page(report):
    assert render_report(report) == render_report(report)


def test_the_factor_card_shows_shapley_values_and_the_interaction(report):
    game = Game(CANDIDATE, {"loading": 1.3, "layout": 1.1, "precision": 0.7}, {("layout", "precision"): 2.0})
    page = render_report(replace(report, speedup=speedup_result(game.probe())))
    text = " ".join(page.split())
    assert "Method: Shapley value over 6 orders. Loading, layout and precision together give 2.00 [2.00, 2.00]" in text
    assert "1.30 x [1.30,\N{NO-BREAK SPACE}1.30]" in page
    assert "mean over the orders" in page
    assert "run with --diagnose for all combinations" in render_report(report)


def test_the_summary_reports_the_wait_of_a_restart_for_workers():
    killed = {"cause": "rank 1 failed", "first_step": 40, "lost_steps": 3, "seconds": 0.4}  # of an older version
    gone = {"cause": "a worker is gone", "first_step": 60, "lost_steps": 0, "seconds": 9.5, "wait_seconds": 7.0}
    rows = dict(summary_table({"train": {"restarts": [killed, gone]}}))
    assert rows["restarts"] == (
        "rank 1 failed: resumed from step 40 after 0.4 s, at least 3 steps repeated; "
        "a worker is gone: resumed from step 60 after 9.5 s (7.0 s waiting for the cluster), at least 0 steps repeated"
    )


def test_summary_table(report):
    rows = dict(summary_table(report.summary))
    assert list(rows) == ["data", "quality", "speedup", "factors", "efficiency", "throughput", "time"]
    unmeasured = "loading not measured, layout not measured, precision not measured, devices not measured"
    assert rows["factors"] == f"{unmeasured} (one at a time)"
    bf16 = make_report(make_probe(candidate=BASELINE.model_copy(update={"precision": "bf16-mixed"})))
    assert re.fullmatch(
        r"precision 1.50 \[1.\d\d, 1.\d\d\] x \(one at a time\)", dict(summary_table(bf16.summary))["factors"]
    )
    assert rows["data"].startswith("45,000 / 5,000 / 10,000")
    assert rows["speedup"] == report.speedup.verdict
    assert rows["time"].startswith("2 min 23 s in all; training process 2 min 23 s: training steps 77 %, probe 7 %")
    assert rows["quality"] == "accuracy 74.81%"
    many = make_report(make_probe(), class_names=tuple(f"class {number}" for number in range(100)))
    assert "top-5 accuracy 99.00%" in dict(summary_table(many.summary))["quality"]
    assert summary_table({}) == []
    choice = {"value": 1200, "reason": "a checkpoint takes 7.0 ms"}
    execution = {"execution": {"reasons": {"checkpoint_steps": choice}}}
    assert summary_table(execution) == [("checkpoints", "every 1,200 steps: a checkpoint takes 7.0 ms")]
    choice["value"] = "by cost"
    assert summary_table(execution) == [], "the training was over before it was known"
    assert dict(summary_table({"speedup": SpeedupResult().model_dump()})) == {"speedup": "not measured"}


@pytest.mark.parametrize(
    ("cause", "setting"),
    [
        ("data-bound", "execution.loading=streaming"),
        ("launch-bound", "recipe.batch_size=512"),
        ("communication-bound", "recipe.batch_size=512"),
        ("compute-bound", "execution.num_nodes=2"),
        ("too few rounds", "speedup.max_seconds=75"),
        ("not measured", "speedup.baseline=probe"),
        ("contaminated machine", "quiet"),
        ("slower", "baseline is faster"),
    ],
)
def test_advice_fits_the_cause(report, cause, setting):
    speedup = SpeedupResult(cause=cause)
    advice = next_steps(report.config, report.plan, report.prepared, report.train, speedup, report.evaluate)
    assert any(setting in item for item in advice)
    assert any("rejected.jsonl" in item for item in advice)
    assert any("commonest mistake" in item for item in advice)


def test_more_devices_are_advised_only_where_they_bring_cores_of_their_own(report):
    """On a CPU they divide those of the host: decision 0005."""

    def advise(cause, accelerator):
        plan = report.plan.model_copy(update={"accelerator": accelerator})
        speedup = SpeedupResult(cause=cause)
        return " ".join(next_steps(report.config, plan, report.prepared, report.train, speedup, report.evaluate))

    for cause in get_args(Cause):
        raised = re.findall(r"execution\.num_devices=(\d+)", advise(cause, "cpu"))
        assert all(int(number) <= report.plan.world_size for number in raised), cause
    assert "only divide its cores" in advise("compute-bound", "cpu")
    assert f"`execution.num_devices={report.config.execution.num_devices + 1}`" in advise("compute-bound", "gpu")
    assert "num_devices" not in advise("identical arms", "cpu")
    assert "num_devices" in advise("identical arms", "gpu")


def test_candidate_label_is_known():
    assert CANDIDATE.label == "1 device, bf16-mixed, channels last, eager, resident"


def test_the_report_shows_what_the_search_and_compiling_took():
    report = make_report(make_probe())
    stats = CompileStats(num_calls=800, num_graphs=2, hit_rate=0.9975, seconds=31.0, recompile_reasons=("size 3",))
    search = AutotuneResult(
        probes=(), slower=(SlowArm(arm=BASELINE, candidate=CANDIDATE, times=2.4),), budget_seconds=40.0, seconds=12.0
    )
    train = report.train.model_copy(update={"compile": stats, "search": search})
    page = render_report(replace(report, train=train))
    for words in (
        "Compiled to 2 graphs in 31.0 s; whether it saves time is not known.",
        "99.75% of 800 calls",
        "Compiled again: size 3.",
        "for 12.0 s of the 40.0 s it might take",
        "1 device, 32-true, contiguous, eager, foreground: 2.4 x the time",
    ):
        assert words in page, words
    assert "Compiled to" not in render_report(report)


def test_the_report_shows_how_near_the_step_came_to_the_device_s_limit():
    probe = make_probe()
    train = make_train(probe, **limited(0.71, 0.2, "NVIDIA H100 80GB HBM3"))
    known = replace(make_report(probe), train=train, share=limit_share(train))
    page = html.unescape(render_report(known))
    assert "of what this device does" in page
    assert "of 3.17 TFLOP/s, 71%" in page
    assert "at least 2 of 10 GB/s, 20%" in page
    assert "of the peak in NVIDIA H100 SXM data sheet, 2023" in page
    busy = replace(known, share=known.share.model_copy(update={"contaminated": True}))
    assert "other work used the machine" in render_report(busy)
    unknown = replace(known, share=LimitShare(why_no_share="torch does not count mine::op"))
    assert "Unknown: torch does not count mine::op." in html.unescape(render_report(unknown))


def test_energy_and_a_budget_that_differs_from_the_clock_outside_are_stated():
    energy = {
        **{"joules": 1000.0, "low": 950.0, "high": 1050.0, "source": "CPU packages", "seconds": 60.0},
        **{
            "idle_watts": 10.0,
            "neighbours": ["python (0.12 cores)"],
            "joules_per_sample": {"baseline": (0.52, 0.5, 0.6)},
        },
    }
    report = make_report(make_probe())
    summary = {**report.summary, "train": {**report.summary["train"], "energy": energy, "clock_difference": 0.05}}
    rows = dict(summary_table(summary))
    assert rows["energy"] == (
        "1,000 J of CPU packages (950 to 1,050); 400 J above 10.0 W before the start; baseline 0.52 J/sample; "
        "neighbours: python (0.12 cores)"
    )
    assert rows["time"].endswith("; its items add up to 5.0% more than a clock outside of it measured")
    train = report.train.model_copy(update={"clock_difference": 0.05})
    page = render_report(replace(report, summary=summary, train=train))
    assert "Its items add up to 5.0% more" in page
    assert "Energy: 1,000 J of CPU packages" in page
    shared = energy | {"low": None, "high": None, "idle_watts": None, "neighbours": []}
    text = dict(summary_table({**summary, "train": {**summary["train"], "energy": shared}}))["energy"]
    assert text == "1,000 J of CPU packages, partly of neighbours; baseline 0.52 J/sample"
