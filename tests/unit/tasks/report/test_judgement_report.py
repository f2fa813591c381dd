"""The page and the rows of a judgement, from rounds whose figures are known."""

import pytest

from paceline.tasks.judge.decision import decide, log_ratios, plan_looks
from paceline.tasks.judge.records import ORDERS, Judgement, ProcessRun, Round
from paceline.tasks.report.judgement_report import describe_caches, draw_judgement, judgement_rows, render_judgement

MEBIBYTE = 2**20


def judgement(*, read=(0, 0), metric=0.5):
    """Twelve rounds, one of them contaminated, in which the new side is 4 to 5 % faster."""

    def run(name, number):
        is_new = name == "new"
        seconds = 1 / (1.04 + 0.001 * number) if is_new else 1.0
        return ProcessRun(seconds=seconds, metric=metric, read_bytes=read[is_new])

    orders = [ORDERS[number % 2] for number in range(12)]
    rounds = [
        Round(order=order, runs=tuple(run(name, number) for name in order), seconds=4.0)
        for number, order in enumerate(orders)
    ]
    valid, busy = rounds[1:], rounds[0].model_copy(update={"contaminated": ("1.50 of 2 cores busy",)})
    decision = decide(log_ratios(valid), None, 0.0, plan_looks(0.05, 11))
    told = {"old": "python a.py", "new": "python <b>.py", "ledger": "mine", "candidate": 3, "level": 0.05}
    times = {"seconds": 48.0, "old_seconds": 1.0, "new_seconds": 0.96}
    return Judgement(**dict(decision), **told, **times, rounds=(busy, *valid))


def test_the_page_has_the_rows_the_pictures_and_the_commands():
    found = judgement()
    figures = draw_judgement(found)
    page = render_judgement(found, figures)
    assert found.outcome == "KEEP"
    assert set(figures) == {"rounds", "processes", "metric"}
    assert page.count("<svg") == 3
    assert "python &lt;b&gt;.py" in page
    for name, text in judgement_rows(found):
        assert (f"<th>{name}</th>" in page) == (name != "outcome"), text
    assert page.count(found.reason.capitalize()[:20]) == 1, "the outcome is the heading"
    rows = dict(judgement_rows(found))
    assert rows["outcome"].startswith("KEEP: ")
    assert "11 rounds of 4 processes, and 1 contaminated" in rows["effort"]
    assert "metric" not in draw_judgement(judgement(metric=None))


@pytest.mark.parametrize(
    ("read", "is_told"),
    [
        ((0, 0), False),
        ((0, MEBIBYTE // 2), False),
        ((0, 300 * MEBIBYTE), True),
        ((300 * MEBIBYTE, 5 * MEBIBYTE), True),
        ((300 * MEBIBYTE, 290 * MEBIBYTE), False),
    ],
)
def test_unlike_caches_are_told(read, is_told):
    found = judgement(read=read)
    assert bool(describe_caches(found)) is is_told
    assert ("caches" in dict(judgement_rows(found))) is is_told
    if is_told:
        assert "300 MiB" in describe_caches(found)
