"""The program from outside: what its help costs, and how it ends."""

import subprocess
import sys
from typing import get_args

import pytest

from paceline.flows.commands import sweep
from paceline.flows.commands.console import run_location, say
from paceline.tasks.sweep.records import Pruner, Sampler

ENGINES = {
    "prefect", "dask", "distributed", "mlflow", "torch", "lightning", "sklearn", "scipy", "numpy", "pandas",
    "matplotlib", "sqlalchemy", "PIL", "fsspec", "psutil", "rich",
}  # fmt: skip


def test_help_imports_no_engine():
    program = "import sys; from paceline.flows.cli import main\ntry: main(['--help'])\nfinally: print(*sys.modules, sep='\\n')"  # noqa: E501
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    loaded = {name.partition(".")[0] for name in printed.splitlines()}
    assert "paceline" in loaded
    assert loaded & ENGINES == set()


@pytest.mark.parametrize(
    ("arguments", "status"), [(["--help"], 0), (["run", "--help"], 0), (["run", "nonsense"], 2), (["bogus"], 2)]
)
def test_the_exit_status_of_the_process(arguments, status):
    done = subprocess.run(
        [sys.executable, "-m", "paceline.flows.cli", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == status
    assert bool(done.stdout) == (status == 0)


@pytest.mark.parametrize("arguments", [["run", "digits", "--show"], ["run", "--help"]])
def test_a_reader_that_has_had_enough_is_no_error(arguments):
    command = [sys.executable, "-m", "paceline.flows.cli", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    _, stderr = process.communicate()
    assert "Traceback" not in stderr
    assert process.returncode in (0, 128 + 13), "what fits into the pipe's buffer is told at once"


@pytest.mark.parametrize(
    ("uri", "expected"), [("http://mlflow:5000", "; it is on http://mlflow:5000"), ("sqlite:///runs.db", " ui")]
)
def test_a_run_is_found_where_it_is(uri, expected, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    told = run_location("0123", "nightly")
    assert told.startswith("0123 in experiment nightly")
    assert told.endswith(expected)


def test_a_sweeps_choices_are_those_that_there_are():
    assert get_args(Sampler) == sweep.SAMPLERS
    assert get_args(Pruner) == sweep.PRUNERS


def test_an_option_has_one_name():
    done = subprocess.run(
        [sys.executable, "-m", "paceline.flows.cli", "study", "digits", "--repeat", "2"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "--repeat" in done.stderr


@pytest.mark.parametrize(("ending", "status"), [("raise OSError('lost')", 1), ("return 130", 130), ("sys.exit(3)", 3)])
def test_it_leaves_after_what_libraries_do_at_exit(ending, status):
    program = (
        "import atexit, sys; from paceline.flows import cli\n"
        f"def main():\n atexit.register(print, 'put away', end='')\n {ending}\n"
        "cli.main = main; cli.program()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == status
    assert done.stdout == "put away"
    assert ("OSError: lost" in done.stderr) == (status == 1)


def test_names_from_outside_cannot_steer_the_terminal(capsys):
    say("class \x1b]0;title\x07\x1b[2J of\r\x9b1m\tfolder\nnext line")
    assert capsys.readouterr().err == "class \\x1b]0;title\\x07\\x1b[2J of\\x0d\\x9b1m\tfolder\nnext line\n"
