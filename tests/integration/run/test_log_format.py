"""`--log-format json`: each line of stderr and of the ranks' logs is a JSON object, in a real run with two ranks."""

import json
from pathlib import Path

import pytest

from tests.integration.conftest import SMALL

FIELDS = ["time", "level", "logger", "message", "run_id", "stage", "rank"]


def parsed(text):
    lines = [json.loads(line) for line in text.splitlines()]
    assert all(list(line) == FIELDS for line in lines)
    return lines


def test_errors_are_lines_of_json(program):
    for arguments in (["run", "nowhere", "--log-format", "json"], ["--log-format=json", "run", "digits", "--nothing"]):
        process = program(*arguments)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (2, "")
        error, hint = parsed(err)
        assert (error["level"], error["message"].partition(":")[0]) == ("ERROR", "error")
        assert hint["message"].startswith("hint: ")


def test_a_format_that_does_not_exist_is_refused(program):
    process = program("run", "digits", "--log-format", "xml")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err.splitlines()[:2] == ["error: --log-format xml is not valid", "hint: choices: text, json"]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["option", "variable"])
def test_every_line_of_a_run_and_of_its_ranks_is_json(paceline, tmp_path, way):
    settings = [*SMALL, "execution.num_devices=2", "speedup.baseline=probe", "speedup.max_seconds=5"]
    home = {"PACELINE_HOME": str(tmp_path)}
    if way == "option":
        process = paceline("run", "digits", *settings, "--json", "--log-format", "json", **home)
    else:
        process = paceline("run", "digits", *settings, "--json", **home, PACELINE_LOG_FORMAT="json")
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err
    summary = json.loads(out.splitlines()[-1])
    lines = parsed(err)
    by_stage = {line["stage"]: line for line in lines}
    assert set(by_stage) >= {None, "prepare", "train", "evaluate", "account"}
    assert {line["run_id"] for line in lines if line["stage"] in ("train", "evaluate")} == {summary["run_id"]}
    assert {line["logger"].partition(".")[0] for line in lines} >= {"prefect", "stderr"}
    logs = sorted(Path(tmp_path).glob("runs/*/attempt-0/rank-*/log.txt"))
    assert len(logs) == 2
    for rank, log in enumerate(logs):
        for line in parsed(log.read_text()):
            assert (line["run_id"], line["rank"]) == (summary["run_id"], rank)


@pytest.mark.slow
def test_the_traceback_of_a_rank_is_one_line(paceline, tmp_path):
    process = paceline(
        "run", "digits", *SMALL, "recipe.learning_rate=1e30", "--log-format", "json", PACELINE_HOME=str(tmp_path)
    )
    _, err = process.communicate(timeout=280)
    assert process.returncode == 1, err
    assert [line["message"] for line in parsed(err) if line["message"].startswith("error: ")]
    (log,) = tmp_path.glob("runs/*/attempt-0/rank-0/log.txt")
    errors = [line for line in parsed(log.read_text()) if line["level"] == "ERROR"]
    assert errors[-1]["message"].startswith("Traceback")
    assert errors[-1]["logger"] == "paceline.tasks.train.rank"
