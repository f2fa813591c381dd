"""The comment and the picture of infra/judge-ci, from judgements as `paceline judge --json` prints them."""

import re
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader

import pytest
import yaml

from paceline.flows import cli
from paceline.tasks.judge.records import ORDERS, Judgement, ProcessRun, Round
from paceline.tasks.measure.paired_ratio import Interval
from tests.support.documents import ROOT

LOADER = SourceFileLoader("judge_ci", str(ROOT / "infra/judge-ci"))
script = module_from_spec(spec_from_loader("judge_ci", LOADER))
LOADER.exec_module(script)


def judgement(**facts):
    """The new side takes 0.8 s, the old one 1 s; one round of six is contaminated."""
    seconds = {"old": 1.0, "new": 0.8}
    runs = tuple(ProcessRun(seconds=seconds[name], metric=0.5) for name in ORDERS[0])
    rounds = [Round(order=ORDERS[0], runs=runs, seconds=4.0) for _ in range(6)]
    rounds[2] = rounds[2].model_copy(update={"contaminated": ("2.00 cores busy",)})
    default = {
        **{"outcome": "KEEP", "reason": "the new side is faster", "num_rounds": 5, "old": "main: a", "new": "HEAD: a"},
        **{"ratio": Interval(value=1.25, low=1.2, high=1.3), "parity": "on par", "margin": 0.005},
        **{"difference": Interval(value=0.0, low=0.0, high=0.0), "ledger": "abc", "candidate": 3, "level": 0.01},
        **{"seconds": 90.0, "old_seconds": 1.0, "new_seconds": 0.8, "rounds": tuple(rounds), "run_id": "f" * 32},
    }
    return Judgement(**default | facts)


def test_the_comment_is_a_table_with_a_picture():
    text = script.comment(judgement().model_dump(mode="json"), "judge.svg")
    rows = dict(re.findall(r"^\| (\w+) \| (.*) \|$", text, re.MULTILINE))
    assert list(rows) == ["old", "new", "outcome", "speed", "quality", "effort", "ledger"]
    assert text.startswith("### Speed: KEEP\n")
    assert "1.25" in rows["speed"]
    assert "1.20 to 1.30" in rows["speed"]
    assert rows["quality"].startswith("on par")
    assert "5 rounds" in rows["effort"]
    assert "1 contaminated" in rows["effort"]
    assert text.rstrip().endswith("(judge.svg)")


def test_a_candidate_cannot_write_into_the_comment():
    text = script.comment(judgement(new="x | y\n# `z` <img src=a> @all [b](c)").model_dump(mode="json"), "judge.svg")
    (row,) = [line for line in text.splitlines() if line.startswith("| new |")]
    assert re.search(r"(?<!\\)[`\[<]|@all", row) is None
    assert len(re.findall(r"(?<!\\)\|", row)) == 3


def test_a_failure_is_a_comment_too():
    text = script.comment(
        {"error": "--new HEAD: it ended with status 1", "hint": None, "setting": "--new"}, "judge.svg"
    )
    assert "status 1" in text
    assert "svg" not in text


@pytest.mark.parametrize("ratio", [Interval(value=1.25, low=1.2, high=1.3), Interval(value=1.25), None])
def test_the_picture_has_a_mark_for_each_round(ratio, tmp_path):
    figure = script.draw_rounds(judgement(ratio=ratio))
    (axis,) = figure.axes
    good, bad = axis.lines[:2]
    assert (list(good.get_xdata()), list(bad.get_xdata())) == ([1, 2, 4, 5, 6], [3])
    assert good.get_ydata() == pytest.approx(1.25)
    assert len(axis.patches) == (ratio is not None and ratio.low is not None)
    figure.savefig(tmp_path / "judge.svg")
    assert (tmp_path / "judge.svg").read_text().count("<svg") == 1


def test_the_workflow_calls_the_script_with_options_that_there_are():
    steps = yaml.safe_load((ROOT / "infra/judge-ci.yml").read_text())["jobs"]["judge"]["steps"]
    (command,) = [step["run"] for step in steps if step.get("id") == "judge"]
    words = command.replace("'", "").split()
    own = words[words.index("--old") : words.index("||")]
    options = cli._parse(["judge", *own])
    assert (options.old, options.new, options.overrides) == ("$BASE", "HEAD", ["python", "train.py"])
