"""The documents say what is true: their commands, settings, presets, plans, files and links are those of the program.

What commands do when they run is looked at in tests/integration/run/test_docs.py; see tests/support/treatments.py.
"""

import os
import re
import shlex
import tomllib
from typing import Annotated, get_args

import pytest
from pydantic import TypeAdapter

from paceline.conf.cluster import Cluster
from paceline.conf.config import Config
from paceline.conf.load import apply, field_paths, load, load_plan, plan_names, preset_names
from paceline.flows import cli
from paceline.flows.commands import run
from paceline.tasks.speedup.study.design import parse_axes
from paceline.tasks.sweep.space import parse_parameters
from tests.support.documents import ROOT, all_commands, anchors, documents, fences, inline_codes, links, living
from tests.support.own_package import EXTEND, install_example_package, on_path
from tests.support.treatments import TREATMENTS, Checked, Story, Told, of_story

PROGRAMS = ("paceline ", "prefect ", "dask ", "infra/", ".ci/", "python ", "pip ", "export ")
SETTING = re.compile(r"(?<![\w.])(?<!--param )(?<!--param [\"'])(?P<key>[a-z_]+\.[a-z_]+)=(?P<value>[^\s`\"]+)")
SECTIONS = {path.partition(".")[0] for path in field_paths() if "." in path}
README = ROOT / "README.md"
TABLES = ROOT / "conf" / "README.md"
WITH_PYTHON = {ROOT / "infra" / "docs" / "guides" / name for name in ("watch.md", "compose.md", "drive.md")}
"""Guides whose Python is run by tests/unit/tasks/watch/test_callback.py, and in tests/integration/run by test_stages.py
and test_drive.py."""
SHOWN = {"", "text", "console", "yaml", "json"}
"""Languages of blocks that show something and are not run."""
SCHEDULER = "$PACELINE_SCHEDULER"
VALUES = {SCHEDULER: "tls://host:8786", "RUN_ID": 32 * "a"}
"""What is put into the place of a word where the pattern of a setting is checked."""
READMES = [path for path in living() if path.parent.name != "decisions"]


def names(paths):
    return [str(path.relative_to(ROOT)) for path in paths]


def paceline_lines():
    """What is typed behind `paceline` anywhere, with an ellipsis where something is left to the reader."""
    served = next(
        command for command in all_commands() if command.startswith("paceline serve ") and "..." not in command
    )
    found = [command for command in all_commands() if command.startswith("paceline ")]
    for _, code in inline_codes():
        words = code.removeprefix(".venv/bin/").split()
        if words[0] == "paceline" and len(words) > 1:
            found.append(" ".join(words))
    return [line.replace("paceline serve ...", served) for line in dict.fromkeys(found)]


def settings():
    """(where, key, value) of each `section.field=value` in commands, blocks and text."""
    texts = [(path, path.read_text()) for path in living()]
    found = [(path, match["key"], match["value"]) for path, text in texts for match in SETTING.finditer(text)]
    lightning = ("model.class_path", "data.class_path")  # LightningCLI's
    return [one for one in found if one[1].partition(".")[0] in SECTIONS and one[1] not in lightning]


def first_columns(heading):
    """First cells of a table of conf/README.md, given the first cell of its head."""
    rows = TABLES.read_text().partition(f"| {heading} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [re.match(r"\| `([^`]+)`", row)[1] for row in rows]


def test_there_are_documents_with_commands():
    assert {"README.md", ".github/CONTRIBUTING.md", "tasks/data/README.md"} <= set(names(documents()))
    assert len(all_commands()) > 30


def test_every_command_has_its_treatment():
    assert set(all_commands()) - set(TREATMENTS) == set(), "say in tests/support/treatments.py what is done with these"
    assert set(TREATMENTS) - set(all_commands()) == set(), "no document has these any more"


def test_every_treatment_is_carried_out():
    assert all(treatment.why for treatment in TREATMENTS.values() if isinstance(treatment, Checked))
    told = {treatment.story for treatment in TREATMENTS.values() if isinstance(treatment, Told)}
    assert told == set(get_args(Story)), "every story has a command, and every command a story that is told"
    assert all(of_story(story) for story in told)


def test_no_command_hides_in_a_block_that_nobody_runs():
    blocks = [fence for path in living() for fence in fences(path)]
    assert {fence.language for fence in blocks if fence.document == EXTEND} == {"bash", "python", "toml"}
    others = [fence for fence in blocks if fence.document != EXTEND]
    assert {fence.language for fence in others} <= {"bash", "python", *SHOWN}
    assert {fence.document for fence in others if fence.language == "python"} == WITH_PYTHON
    lines = [line.strip() for fence in blocks if fence.language in SHOWN for line in fence.body.splitlines()]
    assert [line for line in lines if line.startswith(PROGRAMS)] == []


def test_a_block_can_be_pasted_into_bash_and_zsh():
    """An interactive zsh takes a comment for arguments, and an unquoted bracket for a pattern."""
    for fence in [fence for path in living() for fence in fences(path) if fence.language == "bash"]:
        bare = re.sub(r"\"[^\"]*\"|'[^']*'|^\w+=\(", "", fence.body, flags=re.MULTILINE)
        assert not re.search(r"(^|\s)#|[\[*?]", bare), f"{fence.document}: {fence.body}"


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    """The source and model of guides/extend.md."""
    directory = tmp_path_factory.mktemp("examples")
    install_example_package(directory)
    with on_path(directory):
        yield


@pytest.mark.parametrize("line", paceline_lines())
def test_paceline_understands(line, examples):
    arguments = shlex.split(line.replace(SCHEDULER, VALUES[SCHEDULER]))[1:]
    if len(arguments) == 1 and not arguments[0].startswith("-"):
        assert arguments[0] in cli.COMMANDS  # spoken of, not called
        return
    if arguments == ["--version"]:
        assert cli.main(arguments) == 0
        return
    options = cli._parse(arguments)
    if getattr(options, "code", None) or getattr(options, "preset", None) == "config.yaml":
        return  # tests/integration/run/test_lightning.py
    assert options.command is cli.COMMANDS[arguments[0]].execute
    overrides = list(getattr(options, "overrides", []))
    preset = getattr(options, "preset", None)
    if getattr(options, "plan", None):
        overrides.insert(0, preset or "")
        preset = load_plan(options.plan).preset
    if getattr(options, "resume", None) and preset:
        overrides.insert(0, preset)
        preset = None
        load("digits", overrides)  # whatever was run; only some sections may change, see RESUMABLE_SECTIONS
        assert all(override.startswith(run.RESUMABLE_SECTIONS) for override in overrides)
    for axis in parse_axes(options.axis).items() if getattr(options, "axis", None) else ():
        for value in axis[1]:
            load(preset, [f"{axis[0]}={value}"])
    parse_parameters(options.param) if arguments[0] == "sweep" and not options.resume else None
    if arguments[0] == "predict":
        assert overrides == []
    elif preset or arguments[0] == "doctor":
        load(preset or "digits", [override for override in overrides if override])


@pytest.mark.parametrize(("path", "key", "value"), [pytest.param(*one, id=f"{one[1]}={one[2]}") for one in settings()])
def test_a_setting_exists_and_may_have_that_value(path, key, value):
    assert key in field_paths(), names([path])
    section, name = key.split(".")
    field = Config.model_fields[section].annotation.model_fields[name]
    axis = f"--axis {key}={value}" in path.read_text()
    for word, filling in VALUES.items():
        value = value.replace(word, filling)
    for one in value.rstrip(".,;:)").split(",") if axis else [value.rstrip(".,;:)")]:
        tree = {}
        apply(tree, f"{key}={one}")
        TypeAdapter(Annotated[field.annotation, field]).validate_python(tree[section][name])


def test_the_presets_of_the_table_are_those_that_are_shipped():
    assert sorted(first_columns("Preset")) == preset_names()


def test_the_plans_of_the_table_are_those_that_are_shipped():
    assert sorted(first_columns("Plan")) == plan_names()


def test_the_kinds_of_cluster_of_the_table_are_all():
    assert first_columns("`cluster.kind`") == list(get_args(Cluster.model_fields["kind"].annotation))


def test_every_command_of_the_program_is_in_the_readme():
    text = README.read_text()
    assert [name for name in cli.COMMANDS if f"paceline {name}" not in text] == []


@pytest.mark.parametrize("path", documents(), ids=names(documents()))
def test_links_lead_somewhere(path):
    for link in links(path):
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_scripts_that_are_spoken_of_can_be_run():
    words = {code.split()[0] for _, code in inline_codes()} | {command.split()[0] for command in all_commands()}
    scripts = {word for word in words if word.startswith(("infra/", ".ci/")) and "NNNN" not in word}
    assert {"infra/check", ".ci/run"} <= scripts
    for script in scripts:
        assert (ROOT / script).exists(), script
        assert (ROOT / script).suffix or (ROOT / script).is_dir() or os.access(ROOT / script, os.X_OK), script


def modules_spoken_of(path):
    """Names of modules and presets in the text of a document, with their folders where they are given."""
    codes = {code for document, code in inline_codes() if document == path}
    return {code for code in codes if re.fullmatch(r"[\w./-]+\.(py|yaml)", code)} - {"utils.py"}


@pytest.mark.parametrize("path", READMES, ids=names(READMES))
def test_modules_that_are_spoken_of_are_there(path):
    def is_there(module):
        return (ROOT / module).exists() or any(path.parent.rglob(module)) or any((ROOT / "tests").rglob(module))

    spoken_of = {module for module in modules_spoken_of(path) if "NAME" not in module}
    assert {module for module in spoken_of if not is_there(module)} == set()


@pytest.mark.parametrize("stage", ["data", "train", "speedup"])
def test_the_readme_of_a_stage_leads_through_all_its_modules(stage):
    folder = ROOT / "tasks" / stage
    there = {path.name for path in folder.rglob("*.py")} - {"__init__.py"}
    assert there - {module.rpartition("/")[2] for module in modules_spoken_of(folder / "README.md")} == set()
    assert 40 <= len((folder / "README.md").read_text().splitlines()) <= 90


def test_extras_that_are_spoken_of_exist():
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    found = {extra for _, code in inline_codes() for extra in re.findall(r"(?:paceline|\.)\[(\w+)\]", code)}
    assert "cuda" in found
    assert found <= extras
