"""Wrong input of `paceline judge` starts nothing, and counts no judgement."""

import json

import pytest

from paceline.flows import cli

SIDES = ["--old", "echo loss=1", "--new", "echo loss=1"]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        (["--old", "true"], "--new"),
        (["--new", "true"], "--old"),
        (["--old", " ", "--new", "true"], "--old"),
        ([*SIDES, "--budget", "0"], "--budget"),
        ([*SIDES, "--budget", "soon"], "--budget"),
        ([*SIDES, "--limit", "nan"], "--limit"),
        ([*SIDES, "--metric", "loss=("], "--metric"),
        ([*SIDES, "--steps", "*"], "--steps"),
        ([*SIDES, "--metric", "a", "--metric-key", "b"], "--metric"),
        ([*SIDES, "--margin", "0.1"], "--margin"),
        ([*SIDES, "--metric", "a", "--margin", "-1"], "--margin"),
        (["--ledger"], "--ledger"),
        (["--ledger", "unknown"], "--ledger"),
        (["--ledger", "*"], "--ledger"),
        (["--ledger", "../judge/unknown"], "--ledger"),
        ([*SIDES, "--ledger", "../x"], "--ledger"),
        ([*SIDES, "--ledger", "a b"], "--ledger"),
        ([*SIDES, "--ledger", "größer"], "--ledger"),
        ([*SIDES, "--ledger", "x" * 65], "--ledger"),
    ],
)
def test_wrong_input_is_refused_before_anything_starts(arguments, setting, home, capsys):
    assert cli.main(["judge", *arguments, "--json"]) == cli.WRONG_INPUT
    captured = capsys.readouterr()
    told = json.loads(captured.out)
    assert told["setting"] == setting
    assert told["error"]
    assert told["hint"]
    assert captured.err.splitlines()[0] == f"error: {told['error']}"
    assert not home.exists()
