"""Wrong input of `paceline bisect` starts nothing."""

import json
import subprocess

import pytest

from paceline.flows import cli

ENDS = ["--good", "HEAD~1", "--bad", "HEAD"]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    place = tmp_path / "repository"
    place.mkdir()
    git = ["git", "-C", str(place), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    for message in ("one", "two"):
        subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message", message], check=True)
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(place)
    return tmp_path / "home"


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        (["--good", "HEAD~1", "--", "true"], "--bad"),
        (["--bad", "HEAD", "--", "true"], "--good"),
        (["--good", " ", "--bad", "HEAD", "--", "true"], "--good"),
        (ENDS, "program"),
        ([*ENDS, "--"], "program"),
        ([*ENDS, "--budget", "0", "--", "true"], "--budget"),
        ([*ENDS, "--limit", "nan", "--", "true"], "--limit"),
        ([*ENDS, "--steps", "*", "--", "true"], "--steps"),
        ([*ENDS, "--good-seconds", "1", "--", "true"], "--bad-seconds"),
        ([*ENDS, "--bad-seconds", "1", "--", "true"], "--good-seconds"),
        ([*ENDS, "--good-seconds", "-1", "--bad-seconds", "1", "--", "true"], "--good-seconds"),
        ([*ENDS, "--good-seconds", "2", "--bad-seconds", "1", "--", "true"], "--bad-seconds"),
        (["--good", "HEAD", "--bad", "HEAD", "--", "true"], "--bad"),
        (["--good", "HEAD", "--bad", "HEAD~1", "--", "true"], "--good"),
        (["--good", "v9", "--bad", "HEAD", "--", "true"], "--good"),
        (["--good", "HEAD~1", "--bad", "v9", "--", "true"], "--bad"),
    ],
)
def test_wrong_input_is_refused_before_anything_starts(arguments, setting, home, capsys):
    assert cli.main(["bisect", "--json", *arguments]) == cli.WRONG_INPUT
    told = json.loads(capsys.readouterr().out)
    assert told["setting"] == setting
    assert told["error"]
    assert told["hint"]
    assert not home.exists()


def test_wrong_lock_files_are_refused_before_anything_starts(tmp_path, home, capsys):
    for name, text in (("good.txt", "tool==1.0"), ("same.txt", "tool==1.0"), ("open.txt", "tool>=1.0")):
        (tmp_path / "repository" / name).write_text(text)
    for bad, setting in (("HEAD", "--bad"), ("same.txt", "--bad"), ("open.txt", "--bad")):
        assert cli.main(["bisect", "--json", "--good", "good.txt", "--bad", bad, "--", "true"]) == cli.WRONG_INPUT
        assert json.loads(capsys.readouterr().out)["setting"] == setting
    assert not home.exists()


def test_a_directory_without_a_repository_is_refused(tmp_path, monkeypatch, home, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bisect", *ENDS, "--json", "--", "true"]) == cli.WRONG_INPUT
    assert json.loads(capsys.readouterr().out)["setting"] == "--good"
    assert not home.exists()
