"""Wrong input of `paceline watch` starts nothing."""

import json
import os
import subprocess
import sys

import pytest

from paceline.conf.environment import QUIET_ENVIRONMENT
from paceline.flows import cli


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "No such file or directory"),
        (b"let x = 1;\n", "this is not a Python script (invalid syntax"),
        (b"\x7fELF\x00\x01", "this is not a Python script ("),
    ],
    ids=["missing", "another language", "a program"],
)
def test_what_is_no_script_is_refused(content, says, tmp_path, capsys):
    script = tmp_path / "train.py"
    if content is not None:
        script.write_bytes(content)
    assert cli.main(["watch", str(script), "--epochs", "3"]) == cli.WRONG_INPUT
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: paceline watch {script}: {says}")
    assert hint.startswith("hint: ")


def test_a_script_gets_the_variables_of_its_user(tmp_path):
    script, given = tmp_path / "train.py", os.environ | {"PACELINE_HOME": str(tmp_path), "http_proxy": "http://proxy:1"}
    script.write_text("import json, os\nprint(json.dumps(dict(os.environ)))\n")
    for name in (*QUIET_ENVIRONMENT, "no_proxy", "NO_PROXY"):
        given.pop(name, None)
    started = "import sys; from paceline.flows.cli import main; main(['watch', sys.argv[1]])"
    outputs = [
        subprocess.run([sys.executable, *command, script], env=given, capture_output=True, text=True, check=True).stdout
        for command in ([], ["-c", started])
    ]
    plain, watched = map(json.loads, outputs)
    assert watched == plain


def test_a_script_is_needed(capsys):
    assert cli.main(["watch"]) == cli.WRONG_INPUT
    assert capsys.readouterr().err.splitlines()[0] == "error: paceline watch needs SCRIPT"


def test_arguments_behind_the_script_are_its_own():
    options = cli._parse(["watch", "--no-replay", "train.py", "--epochs", "3", "-q", "lr=0.1", "--help"])
    assert (options.script, options.no_replay, options.quiet) == ("train.py", True, False)
    assert options.arguments == ["--epochs", "3", "-q", "lr=0.1", "--help"]
