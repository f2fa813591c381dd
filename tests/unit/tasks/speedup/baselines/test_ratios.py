"""The four ratios: their intervals, their sentences, and which one is in the headline."""

import html
from dataclasses import replace

import numpy as np
import pytest

from paceline.conf.config import Config, Speedup
from paceline.tasks.records.measurement import Block, CompetentCosts
from paceline.tasks.report.run_report import render_report
from paceline.tasks.report.summary import summary_table
from paceline.tasks.speedup.baselines.ratios import HEADLINES, add_ratios
from paceline.tasks.speedup.limit_share import add_share, limit_share
from paceline.tasks.speedup.records import SpeedupResult
from paceline.tasks.speedup.verdict import speedup_result
from tests.support.reports import CANDIDATE, limited, make_probe, make_report, make_train

LOOP = CANDIDATE.model_copy(update={"variant": "competent"})
COSTS = CompetentCosts(
    start_seconds=2.0,
    build_seconds=1.0,
    evaluation_seconds=(1e-4, 1.01e-4, 1.02e-4, 1.0e-4, 0.99e-4),
    record_seconds=0.05,
    num_workers=1,
    num_threads=2,
)


def probed(over_competent=1.2, costs=COSTS, **fields):
    """A probe in which the candidate is so many times as fast as the loop."""
    probe = make_probe(samples_per_step={"baseline": 64, "candidate": 64, "competent": 64}, **fields)
    rng = np.random.default_rng(7)
    seconds = 2e-3 / 1.5 * over_competent
    rounds = tuple(
        (*blocks, Block(arm="competent", seconds_per_sample=seconds * np.exp(rng.normal(0, 0.01)), num_steps=4))
        for blocks in probe.rounds
    )
    return probe.model_copy(update={"rounds": rounds, "others": {"competent": LOOP}, "competent": costs})


def judged(probe, cold_seconds=200.0, config=None, **fields):
    limits = limited() | {"time_budget": {"probe": 10.0, "limit": 2.0, "forward": 80.0}}
    train = make_train(probe, **limits | fields)
    prepared = make_report(None).prepared
    speedup = add_share(speedup_result(probe, train), limit_share(train))
    return add_ratios(speedup, config or Config(), prepared, train, cold_seconds)


def test_each_ratio_has_its_interval_and_its_sentence():
    result = judged(probed())
    assert list(result.ratios) == ["naive", "competent", "end_to_end", "of_limit"]
    for ratio in result.ratios.values():
        assert ratio.low < ratio.value < ratio.high
        assert "95 % interval" in ratio.meaning
    assert result.ratios["naive"].value == result.ratio
    assert result.ratios["competent"].low <= 1.2 <= result.ratios["competent"].high
    assert "1 DataLoader worker and 2 threads" in result.ratios["competent"].meaning
    assert result.ratios["of_limit"].value == result.of_limit


def test_end_to_end_adds_up_what_was_measured():
    result, prepared = judged(probed()), make_report(None).prepared
    num_samples = prepared.num_test + 8 * prepared.num_validation
    step = 2e-3 / 1.5 * 1.2 * prepared.num_train / 50
    loop = 2.0 + 1.0 + prepared.seconds + 0.05 + (400 - 2) * step + num_samples * 1e-4
    assert result.ratios["end_to_end"].value == pytest.approx(loop / 200.0, rel=0.01)
    assert result.ratios["end_to_end"].meaning.endswith(
        f"the ratio is {result.ratios['end_to_end'].value * 200 / 188:.2f}"
    )


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"cold_seconds": None}, "did not start in a process of its own"),
        ({"first_step": 30}, "interrupted"),
    ],
)
def test_end_to_end_is_unknown_where_a_part_is(fields, reason):
    ratios = judged(**{"probe": probed()} | fields).ratios
    assert ratios["end_to_end"].value is None
    assert reason in ratios["end_to_end"].meaning
    assert ratios["competent"].value is not None


@pytest.mark.parametrize(
    ("settings", "headline"),
    [
        ({}, "competent"),
        ({"headline": "naive"}, "naive"),
        ({"headline": "end_to_end"}, "end_to_end"),
        ({"headline": "of_limit"}, "of_limit"),
    ],
)
def test_a_setting_selects_the_headline(settings, headline):
    assert judged(probed(), config=Config(speedup=Speedup(**settings))).headline == headline


@pytest.mark.parametrize(
    ("probe", "settings", "reason"),
    [
        (make_probe(left_out={"competent": "its process ended"}), {}, "its process ended"),
        (make_probe(), {"competent_loop": False}, "speedup.competent_loop is false"),
        (make_probe(), {"max_seconds": 3.0}, "speedup.max_seconds=3"),
        (None, {"baseline": "none"}, "the run had no probe"),
    ],
)
def test_without_the_loop_the_naive_baseline_takes_the_headline_with_its_name(probe, settings, reason):
    result = judged(probe, config=Config(speedup=Speedup(**settings)))
    for name in ("competent", "end_to_end"):
        assert result.ratios[name].value is None
        assert reason in result.ratios[name].meaning
    assert result.headline == ("naive" if probe else None)


def test_a_loop_whose_rounds_were_warm_up_has_no_ratio_and_the_reason():
    probe = probed()
    rounds = tuple(blocks[:-1] for blocks in probe.rounds)
    result = judged(probe.model_copy(update={"warm_up": probe.rounds[:2], "rounds": rounds}))
    assert result.ratios["competent"].value is None
    assert "the rounds of the loop were warm-up" in result.ratios["competent"].meaning


@pytest.mark.parametrize("headline", ["naive", "competent", "end_to_end", "of_limit"])
def test_the_four_sentences_are_in_summary_and_report(headline):
    report = make_report(probed())
    speedup = judged(probed(), config=Config(speedup=Speedup(headline=headline)))
    summary = dict(report.summary) | {"speedup": speedup.model_dump(mode="json")}
    page = html.unescape(" ".join(render_report(replace(report, speedup=speedup, summary=summary)).split()))
    rows = dict(summary_table(summary | LIMITED))
    for name, ratio in speedup.ratios.items():
        assert ratio.meaning in rows[name.replace("_", " ")]
        assert ratio.meaning[:60] in page
    assert HEADLINES[headline] in rows["headline"]
    assert "95 % interval" in rows["headline"]
    assert HEADLINES[headline] in page


LIMITED = {
    "execution": {"precision": "bf16-mixed"},
    "train": {
        "world_size": 1,
        "mfu": None,
        "flops_per_second": 1e9,
        "limit": {"flops_per_second": {"bf16-mixed": 2e9}, "contaminated": False},
    },
}


def test_equal_hardware_is_the_throughput_over_one_rank_on_all_cores():
    probe = probed()
    rounds = tuple(
        (*blocks, Block(arm="all_cores", seconds_per_sample=2e-3 / 1.5 * 0.9, num_steps=4)) for blocks in probe.rounds
    )
    result = judged(probe.model_copy(update={"rounds": rounds}))
    assert result.equal_hardware.value == pytest.approx(0.9, rel=0.02)
    assert judged(probe).equal_hardware is None


def test_old_results_have_no_ratios():
    assert SpeedupResult().ratios == {}
