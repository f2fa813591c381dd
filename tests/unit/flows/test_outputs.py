"""The schemas of what commands print and read: each command has both, and what it prints is as they say."""

import json

import pytest
from jsonschema import Draft202012Validator, ValidationError

from paceline.flows import cli
from tests.support.outputs import told_by

PARSERS = cli._parser()._subparsers._group_actions[0].choices


def schema_of(name, capsys, *options):
    assert cli.main(["schema", name, *options]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_command_prints_json_and_has_a_schema(capsys):
    assert [name for name, parser in PARSERS.items() if "--json" not in parser.format_help()] == []
    assert cli.main(["schema", "--json"]) == 0
    listed = told_by("schema", capsys.readouterr().out)["commands"]
    assert {one["name"]: one["help"] for one in listed} == {one.name: one.sentence for one in cli.COMMANDS.values()}


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_schemas_are_valid_and_closed(name, capsys):
    for options in ((), ("--input",)):
        schema = schema_of(name, capsys, *options)
        Draft202012Validator.check_schema(schema)
        assert schema["$schema"] == Draft202012Validator.META_SCHEMA["$id"]
        known = {f"#/$defs/{key}" for key in schema.get("$defs", {})}
        assert set(references(schema)) <= known
    check = Draft202012Validator(schema_of(name, capsys))
    check.validate({"error": "wrong", "hint": None, "setting": None})
    assert name == "schema" or not check.is_valid({"unknown": 1})


def references(tree):
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if key == "$ref":
            yield value
        elif isinstance(value, (dict, list)):
            yield from references(value)


@pytest.mark.parametrize(
    "arguments",
    [
        *(
            ["presets"],
            ["settings", "recipe."],
            ["completion", "bash"],
            ["schema", "run"],
            ["schema", "run", "--input"],
        ),
        *(["run", "digits", "--show"], ["clean", "--dry-run"]),
    ],
    ids=" ".join,
)
def test_what_is_printed_fits(arguments, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    assert cli.main([*arguments, "--json"]) == 0
    told_by(arguments[0], capfd.readouterr().out)


@pytest.mark.parametrize(
    "arguments", [["judge"], ["schema", "jugde"], ["run", "digits", "recipe.num_epochs=2.5"], ["predict"], ["rnu"]]
)
def test_a_failure_fits(arguments, capsys):
    assert cli.main([*arguments, "--json"]) == cli.WRONG_INPUT
    told = told_by(arguments[0] if arguments[0] in PARSERS else "run", capsys.readouterr().out)
    assert set(told) == {"error", "hint", "setting"}


def test_the_input_of_a_command_is_its_options_and_the_settings(capsys):
    check = Draft202012Validator(schema_of("run", capsys, "--input"))
    check.validate({"preset": "digits", "settings": {"recipe": {"num_epochs": 3}}, "--diagnose": True})
    for wrong in ({"settings": {"recipe": {"num_epochs": "many"}}}, {"--budgt": 1}, {"--diagnose": "yes"}):
        with pytest.raises(ValidationError):
            check.validate(wrong)
    judge = schema_of("judge", capsys, "--input")["properties"]
    assert judge["--budget"]["type"] == "number"
    assert judge["--ledger"]["type"] == ["string", "boolean"]
    assert judge["WORD"]["type"] == "array"
    bisect = schema_of("bisect", capsys, "--input")["properties"]
    assert (bisect["--budget"]["default"], bisect["PROGRAM"]["type"]) == (900, "array")
    assert schema_of("predict", capsys, "--input")["required"] == ["MODEL"]
