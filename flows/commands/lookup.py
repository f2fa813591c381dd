"""`paceline presets`, `settings`, `schema` and `completion`: look up names and forms without starting anything."""

import json
import sys
import textwrap
from argparse import Namespace
from fnmatch import fnmatch
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from paceline.conf import plugins
from paceline.conf.config import Config
from paceline.conf.hints import ALIASES, did_you_mean, suggest, suggest_setting, typed, yaml_text
from paceline.conf.load import PRESETS, flatten, load, preset_names, walk
from paceline.flows.commands.console import JSON, argument, command, write_json
from paceline.tasks.errors import InputError

COMMON = (
    *("data.root", "data.image_size", "data.classes", "data.validation_fraction"),
    *("model.name", "model.width", "model.pretrained"),
    *("recipe.optimizer", "recipe.learning_rate", "recipe.batch_size", "recipe.num_epochs", "recipe.augment"),
    *("execution.accelerator", "execution.num_nodes", "execution.num_devices", "execution.precision"),
    *("execution.compile", "cluster.kind", "track.experiment", "seed"),
)
WIDTH = 110
_WORDS: dict[object, str] = {int: "whole number", float: "number", str: "text", bool: "true or false", NoneType: "null"}


class Setting(NamedTuple):
    """A setting of a run."""

    name: str
    type: str
    default: Any
    help: str


def all_settings() -> list[Setting]:
    """All settings, in the order of the schema."""
    return [
        Setting(name, type_text(field.annotation), value, " ".join((field.description or "").split()))
        for name, field, value in walk(Config())
    ]


def type_text(kind: object) -> str:
    """A type in words: choices with `|` between them, `list of texts` for a tuple."""
    if get_origin(kind) is Annotated:
        return type_text(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return " | ".join(dict.fromkeys(type_text(member) for member in get_args(kind)))
    if get_origin(kind) is Literal:
        return " | ".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        members = [member for member in get_args(kind) if member is not ...]
        return f"list of {f'{len(members)} ' if len(members) > 1 else ''}{type_text(members[0])}s"
    return "mapping" if get_origin(kind) is dict else _WORDS[kind]


@command(("paceline presets", "paceline presets --json"), JSON)
def presets(options: Namespace) -> None:
    """List the presets: task, data, what they are."""
    rows = []
    for name in preset_names():
        config = load(name)
        first = (PRESETS / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")[0]
        what = first.removeprefix("# What:").strip()
        needs_data = plugins.source_facts(config.data.source).needs_root
        rows.append({"name": name, "task": config.model.task, "needs_data": needs_data, "what": what})
    if options.json:
        write_json(sys.stdout, {"presets": rows})
        return
    print(f"{'preset':<14}{'task':<10}{'data':<10}what")
    for row in rows:
        data = "yours" if row["needs_data"] else "built in"
        what = textwrap.shorten(str(row["what"]).partition("; ")[0], WIDTH - 34, placeholder=" ...")
        print(f"{row['name']:<14}{row['task']:<10}{data:<10}{what}")
    print("\nStart one with: paceline run PRESET; presets that need your data take data.root=DIR")


@command(
    ("paceline settings learning_rate", "paceline settings execution."),
    argument("pattern PATTERN", 'part of a name, a word of the help, or a pattern such as "*.num_*"', nargs="?"),
    JSON,
)
def settings(options: Namespace) -> None:
    """List the settings: type, default, help."""
    matches = matching(options.pattern) if options.pattern else all_settings()
    if options.json:
        write_json(sys.stdout, {"settings": [setting._asdict() for setting in matches]})
        return
    for setting in matches:
        print(f"{setting.name}={yaml_text(setting.default)}   ({setting.type})")
        print(textwrap.fill(setting.help, WIDTH, initial_indent="    ", subsequent_indent="    "))


def matching(pattern: str) -> list[Setting]:
    """The settings whose names match, else those that a word of another tool means, else those whose help matches."""
    settings = all_settings()
    word = pattern.lower()
    alias = ALIASES.get(word.replace("-", "_"))
    matches = (
        [setting for setting in settings if word in setting.name or fnmatch(setting.name, word)]
        or [setting for setting in settings if setting.name == alias]
        or [setting for setting in settings if word in setting.help.lower()]
    )
    if not matches:
        near = suggest_setting(pattern, [setting.name for setting in settings])
        hint = did_you_mean(near, "list all settings with: paceline settings")
        raise InputError(f"no setting matches {pattern}", hint=hint, setting="PATTERN")
    return matches


def print_common(preset: str, overrides: list[str]) -> None:
    """Print the most common settings, as a preset has them."""
    values = flatten(load(preset, overrides))
    helps = {setting.name: setting.help for setting in all_settings()}
    print(f"\nCommon settings, with their values in the preset {preset}:")
    for name in COMMON:
        shown = f"  {name}={typed(values[name])}"
        print(f"{shown:<36}{textwrap.shorten(helps[name], WIDTH - 36, placeholder=' ...')}")
    print("\nAll settings: paceline settings. What `auto` becomes on this machine: paceline run PRESET --show.")


@command(
    ("paceline schema judge", "paceline schema run --input"),
    argument("name COMMAND", "command whose JSON is described; without it, all commands are listed", nargs="?"),
    argument("--input", "describe the arguments and settings that the command reads, not the JSON that it prints"),
    JSON,
)
def schema(options: Namespace) -> None:
    """Print the JSON Schema of what a command prints with --json, or of its arguments."""
    parsers = options.root._subparsers._group_actions[0].choices
    if options.name is None:
        found: Any = {"commands": [{"name": name, "help": one.description} for name, one in parsers.items()]}
    elif options.name not in parsers:
        near = did_you_mean(suggest(options.name, list(parsers)), "list the commands with: paceline schema")
        raise InputError(f"unknown command {options.name}", hint=near, setting="COMMAND")
    else:
        from paceline.flows.outputs import input_schema, output_schema

        name = options.name
        found = input_schema(name, parsers[name]) if options.input else output_schema(name)
    write_json(sys.stdout, found) if options.json else print(json.dumps(found, indent=2))


@command(
    ('eval "$(paceline completion bash)"', 'eval "$(paceline completion zsh)"'),
    argument("shell", "shell that reads the script", choices=("bash", "zsh")),
    JSON,
)
def completion(options: Namespace) -> None:
    """Print a script that completes commands and settings in a shell."""
    actions = options.root._subparsers._group_actions[0]
    cases, takers = [], []
    for name, parser in actions.choices.items():
        words = [word for action in parser._actions for word in action.option_strings if word.startswith("--")]
        words += [word for action in parser._actions if not action.option_strings for word in action.choices or ()]
        cases.append(f'    {name}) words="{" ".join(words)}" ;;')
        if any(action.dest == "overrides" for action in parser._actions):
            takers.append(name)
    script = _COMPLETION.format(
        shell=options.shell,
        zsh="autoload -U +X bashcompinit && bashcompinit\n" if options.shell == "zsh" else "",
        commands=" ".join(actions.choices),
        cases="\n".join(cases),
        presets=" ".join(preset_names()),
        takers="|".join(takers),
        settings=" ".join(f"{setting.name}=" for setting in all_settings()),
    )
    write_json(sys.stdout, {"script": script}) if options.json else print(script, end="")


_COMPLETION = """# Completion of paceline; put into ~/.{shell}rc:  eval "$(paceline completion {shell})"
{zsh}_paceline() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" words=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{commands} --help --version" -- "$word"))
    return
  fi
  case "${{COMP_WORDS[1]}}" in
{cases}
  esac
  case "${{COMP_WORDS[1]}}" in
    {takers})
      words="$words {settings}"
      [ "$COMP_CWORD" -eq 2 ] && words="$words {presets}" ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  case "${{COMPREPLY[0]}}" in *=) compopt -o nospace 2>/dev/null ;; esac
}}
complete -o default -F _paceline paceline
"""
