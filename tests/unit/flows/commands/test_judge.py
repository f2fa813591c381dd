"""Wrong input of `paceline judge` starts nothing, and counts no judgement."""

import json
import shlex
import sys

import pytest

from paceline.conf.load import load
from paceline.flows import cli, judge
from paceline.flows.commands.judge import AS_SIDE
from tests.support.own_lightning import PACKAGE

SIDES = ["--old", "echo loss=1", "--new", "echo loss=1"]
BF16 = ["--old", "", "--new", "execution.precision=bf16-mixed"]


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
        ([*SIDES, "--metric", "a", "--mlflow-metric", "b"], "--metric"),
        ([*SIDES, "--mlflow-metric", ""], "--mlflow-metric"),
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
        ([*SIDES, "--code", "."], "--code"),
        (["digts", *BF16], "preset"),
        (["digits", "--old", ""], "--new"),
        (["digits", "recipe.num_epoch=2", *BF16], "recipe.num_epoch"),
        (["digits", *BF16, "recipe.num_epoch=2"], "recipe.num_epoch"),
        (["digits", "--old", "", "--new", "recipe.num_epoch=2"], "recipe.num_epoch"),
        (["digits", "--old", "recipe.num_epochs=soon", "--new", ""], "recipe.num_epochs"),
        (["digits", "--old", "HEAD~1", "--new", "HEAD"], "HEAD~1"),
        (["digits", "--old", "'", "--new", ""], "--old"),
        (["digits", "--old", "", "--new", ""], "--new"),
        (["digits", "--old", "", "--new", "recipe.num_epochs=8"], "--new"),
        (["digits", "--old", "seed=1", "--new", "seed=2"], "--new"),
        (["digits", *BF16, "--metric", "loss=(.*)"], "--metric"),
        (["digits", *BF16, "--mlflow-metric", "loss"], "--mlflow-metric"),
        (["digits", *BF16, "--steps", "took (.*)s"], "--steps"),
        (["digits", *BF16, "--lower-is-better"], "--lower-is-better"),
        (["digits", *BF16, "--code", "."], "--code"),
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


@pytest.fixture
def asked(monkeypatch):
    """What a judgement of settings is asked for, instead of the judgement."""

    class Asked(Exception):
        pass

    def stop(site, question, old, ledger_name):
        raise Asked(question, old, ledger_name)

    def call(*arguments):
        with pytest.raises(Asked) as caught:
            cli.main(["judge", *arguments])
        return caught.value.args

    monkeypatch.setattr(judge, "judge_settings", stop)
    return call


def test_each_side_is_a_run_with_its_settings_and_without_a_probe(asked, home):
    old, new = "execution.precision=32-true", "execution.precision=bf16-mixed 'track.experiment=my own'"
    question, config, ledger = asked("digits", "recipe.num_epochs=2", "--old", old, "--new", new, "--ledger", "mine")
    shared = [sys.executable, "-P", "-m", "paceline.flows.cli", "run", "digits", "recipe.num_epochs=2"]
    words = shlex.split(question.old.command)
    assert words == [*shared, old, *AS_SIDE, "name=old", "--json"]
    assert shlex.split(question.new.command) == [*shared, *shlex.split(new), *AS_SIDE, "name=new", "--json"]
    assert config == load("digits", words[6:-1])
    assert question.new.label == f"paceline run digits recipe.num_epochs=2 {new}"
    assert (question.metric_key, question.lower_is_better, ledger) == ("evaluate.accuracy", False, "mine")
    assert (question.budget_seconds, question.limit_seconds) == (1800, 1800)
    assert question.old.directory == str(home.parent)


@pytest.mark.parametrize(
    ("preset", "key"), [("shapes", "evaluate.mean_iou"), ("textures", "evaluate.ssim"), ("digits", "evaluate.accuracy")]
)
def test_the_metric_is_the_score_of_the_task(preset, key, asked):
    question, *_ = asked(preset, *BF16, "--margin", "0.02", "--budget", "60")
    assert (question.metric_key, question.margin, question.budget_seconds) == (key, 0.02, 60)
    question, *_ = asked("digits", *BF16, "--metric-key", "train.final_loss", "--lower-is-better")
    assert (question.metric_key, question.lower_is_better) == ("train.final_loss", True)


@pytest.mark.slow
def test_own_lightning_code_names_its_metric(asked, monkeypatch, capsys):
    pytest.importorskip("jsonargparse", reason="LightningCLI needs it; infra/install brings it")
    monkeypatch.chdir(PACKAGE)
    sides = ["--old", "model.init_args.width=32", "--new", "model.init_args.width=16"]
    own = ["config.yaml", "--code", ".", *sides]
    assert cli.main(["judge", *own, "--json"]) == cli.WRONG_INPUT
    assert json.loads(capsys.readouterr().out)["setting"] == "--metric-key"
    question, config, _ = asked(*own, "--metric-key", "metrics.val_loss", "--lower-is-better")
    assert config.lightning.settings["model"]["init_args"]["width"] == 32
    assert shlex.split(question.old.command)[-4:] == ["name=old", "--code", ".", "--json"]
    assert question.new.label == "paceline run config.yaml model.init_args.width=16 --code ."


def test_a_program_stands_behind_dashes(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(judge, "judge_revisions", lambda site, question, name: asked.append(question) or sys.exit(5))
    with pytest.raises(SystemExit):
        cli.main(["judge", "--old", "HEAD~1", "--new", "HEAD", "--", "make", "--jobs", "digits", "recipe.num_epochs=2"])
    assert asked[0].old.command == "make --jobs digits recipe.num_epochs=2"
    assert (asked[0].old.revision, asked[0].budget_seconds) == ("HEAD~1", 300)
    assert cli.main(["judge", "make", "--old", "HEAD~1", "--new", "HEAD"]) == cli.WRONG_INPUT
    assert "make" in capsys.readouterr().err
