"""The program from outside: its help, its errors, and how it ends."""

import json
import os
import shlex
import subprocess
import sys
from typing import get_args

import pytest

from paceline.conf.environment import quieten
from paceline.conf.load import field_paths, load, preset_names
from paceline.flows import cli
from paceline.flows.commands import lookup, sweep
from paceline.flows.commands.console import run_location, say
from paceline.tasks.sweep.records import Pruner, Sampler

ENGINES = {
    "prefect", "dask", "distributed", "mlflow", "torch", "lightning", "sklearn", "scipy", "numpy", "pandas",
    "matplotlib", "sqlalchemy", "PIL", "fsspec", "psutil", "rich",
}  # fmt: skip


@pytest.mark.parametrize("arguments", [[], ["--help"], ["--version"], ["run", "--help"], ["presets"], ["settings"]])
def test_help_imports_no_engine(arguments):
    program = f"import sys; from paceline.flows.cli import main\ntry: main({arguments})\nfinally: print(*sys.modules, sep='\\n', file=sys.stderr)"  # noqa: E501
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stderr
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
    ("uri", "expected"), [("http://mlflow:5000", "; it is on http://mlflow:5000"), ("sqlite:///runs.db", " ui 0123")]
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


def test_without_arguments_it_prints_the_help(capsys):
    assert cli.main([]) == 0
    printed = capsys.readouterr().out
    assert printed.count("\n  paceline ") == 3, "commands to start with"
    assert all(f"\n{group}:\n" in printed for group in cli.GROUPS)


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_the_version(option, capsys):
    assert cli.main([option]) == 0
    assert capsys.readouterr().out.startswith("paceline 0")


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_each_command_has_two_examples_that_it_understands(name):
    for example in cli.COMMANDS[name].examples:
        words = shlex.split(example.removeprefix('eval "$(').removesuffix(')"'))
        assert words[:2] == ["paceline", name]
        assert cli._parse(words[1:]).command is cli.COMMANDS[name].execute


@pytest.mark.parametrize(
    ("arguments", "setting", "hint"),
    [
        (["rnu"], "command", "did you mean run?"),
        (["xyzzy"], "command", "paceline --help"),
        (["run", "digts"], "preset", "did you mean digits? Else list the presets with: paceline presets"),
        (["run", "digits", "--shw"], "--shw", "did you mean --show?"),
        (["run", "digits", "--epochs", "3"], "--epochs", "did you mean the setting recipe.num_epochs=VALUE?"),
        (["run", "digits", "execution.precision=bf15-mixed"], "execution.precision", "did you mean bf16-mixed?"),
        (["sweep", "digits", "--sampler", "rndom"], "--sampler", "did you mean random?"),
        (["settings", "recipe.learnign_rate"], "PATTERN", "did you mean recipe.learning_rate?"),
        (["predict"], "MODEL", "for example: paceline predict RUN_ID DIR"),
        (["advise", "digits", "--deadline", "soon"], "--deadline", "paceline advise --help"),
        (["advise", "digits", "--latency", "1e-6"], "--bandwidth", "give both"),
    ],
)
def test_an_error_has_two_lines_and_a_suggestion(arguments, setting, hint, capsys, monkeypatch):
    raised = []
    say_error = cli.say_error
    monkeypatch.setattr(cli, "say_error", lambda error, **options: (raised.append(error), say_error(error, **options)))
    assert cli.main(arguments) == 2
    fault, line = capsys.readouterr().err.splitlines()
    assert fault.startswith("error: ")
    assert line.startswith(f"hint: {hint}")
    assert raised[0].setting == setting


def test_json_has_the_error_the_hint_and_the_setting(capsys):
    assert cli.main(["run", "digits", "recipe.num_epochs=2.5", "--json"]) == 2
    streams = capsys.readouterr()
    outcome = json.loads(streams.out)
    assert outcome["setting"] == "recipe.num_epochs"
    assert streams.err == f"error: {outcome['error']}\nhint: {outcome['hint']}\n"


@pytest.mark.parametrize("preset", ["digits", "twohead", "tones", "shapes"])
@pytest.mark.parametrize(
    "overrides", [[], ["execution.compile=off", "recipe.learning_rate=1e-5", "data.classes=['0','1']", "name=it's: #1"]]
)
def test_what_show_prints_is_a_preset(preset, overrides, capsys, tmp_path):
    overrides = [one for one in overrides if preset == "digits" or "classes" not in one]
    assert cli.main(["run", preset, *overrides, "--show"]) == 0
    shown = capsys.readouterr().out
    assert "None" not in shown
    assert [line for line in shown.splitlines() if line.endswith(": auto")] == [], "without a reason"
    assert "accelerator: auto  # -> cpu (" in shown or "accelerator: auto  # -> gpu (" in shown
    saved = tmp_path / "saved.yaml"
    saved.write_text(shown)
    assert load(str(saved)) == load(preset, overrides)


def test_show_with_json(capsys):
    assert cli.main(["run", "digits", "--show", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["config"] == load("digits").model_dump(mode="json")
    assert {"value", "reason"} == set(shown["choices"]["execution.precision"])


def test_the_presets_and_settings_can_be_looked_up(capsys):
    assert cli.main(["presets", "--json"]) == 0
    presets = {one["name"]: one for one in json.loads(capsys.readouterr().out)["presets"]}
    assert list(presets) == preset_names()
    assert (presets["folder"]["needs_data"], presets["digits"]["needs_data"]) == (True, False)
    assert cli.main(["settings", "--json"]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert tuple(one["name"] for one in settings) == field_paths()
    assert all(one["type"] and one["help"] for one in settings)
    assert cli.main(["settings"]) == 0
    assert "None" not in capsys.readouterr().out
    assert [one.name for one in lookup.matching("lr")] == ["recipe.learning_rate"]
    assert {one.name for one in lookup.matching("*.num_epochs")} == {"recipe.num_epochs"}
    assert set(lookup.COMMON) <= set(field_paths())
    assert len(lookup.COMMON) == 20


@pytest.mark.parametrize(
    ("word", "expected"), [("digi", "digits"), ("recipe.num_e", "recipe.num_epochs="), ("--sh", "--show")]
)
def test_the_shell_completes_presets_settings_and_options(word, expected, capsys):
    assert cli.main(["completion", "bash"]) == 0
    script = (
        capsys.readouterr().out + f'COMP_WORDS=(paceline run {word}); COMP_CWORD=2; _paceline; echo "${{COMPREPLY[*]}}"'
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [expected]
    assert cli.main(["completion", "zsh"]) == 0
    assert "bashcompinit" in capsys.readouterr().out


def test_quiet_leaves_errors_and_verbose_adds_their_traceback(capsys, monkeypatch):
    for name in ("PREFECT_LOGGING_LEVEL", "MLFLOW_LOGGING_LEVEL"):
        monkeypatch.setenv(name, "INFO")
    assert cli.main(["run", "digts", "--quiet"]) == 2
    say("a result")
    assert len(capsys.readouterr().err.splitlines()) == 2
    assert cli.main(["--verbose", "run", "digts"]) == 2
    assert os.environ["PREFECT_LOGGING_LEVEL"] == "DEBUG"
    assert "Traceback" in capsys.readouterr().err
    say("a result")
    assert capsys.readouterr().err == "a result\n"


def test_no_color_reaches_the_engines(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("PREFECT_LOGGING_COLORS", "")
    monkeypatch.delenv("PREFECT_LOGGING_COLORS")
    quieten()
    assert os.environ["PREFECT_LOGGING_COLORS"] == "false"
