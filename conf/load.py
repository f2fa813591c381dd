"""Read a preset and its overrides into one `Config`, or the plan of a study; raise errors with hints."""

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Self, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from paceline.conf import hints
from paceline.conf.config import Config
from paceline.conf.hints import VALUE_ALIASES, HintedError, suggest, suggest_setting
from paceline.conf.section import Section, Text

FOLDER = Path(__file__).parent
LIGHTNING = "lightning"
"""In place of a preset: all settings of own Lightning code are on the command line."""
PRESETS, PLANS, DASK_SETTINGS = FOLDER / "presets", FOLDER / "plans", FOLDER / "dask" / "dask.yaml"
M = TypeVar("M", bound=BaseModel)
NOTHING = ("", "null", "none", "~")  # words that leave an optional setting unset, in any case of their letters


class _Loader(yaml.SafeLoader):
    """YAML in which `off`, `on`, `yes` and `no` are words: YAML 1.1 makes `compile: off` a truth value."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class ConfigError(HintedError, ValueError):
    """The configuration is wrong."""


def preset_names() -> list[str]:
    """Names of the shipped presets."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def find_yaml(directory: Path, name: str) -> Path | None:
    """The file of a shipped name, or of any path; None without one."""
    paths = directory / f"{name}.yaml", Path(name)
    return next((path for path in paths if os.path.isfile(path)), None)  # noqa: PTH113  which takes any text


def load(preset: str, overrides: list[str] | None = None) -> Config:
    """Read a preset by name or path and apply `key=value` overrides; raise ConfigError with the first problem."""
    if is_lightning(preset):
        fault = f"{preset} stands for your own Lightning code, which cannot be used here so far"
        raise ConfigError(fault, hint="use paceline run, study, sweep or serve", setting="preset")
    tree = apply(_read_preset(preset), *overrides or ())
    tree.setdefault("name", Path(preset).stem)
    return validate(tree)


def is_lightning(preset: str) -> bool:
    """Whether this is a file of LightningCLI, or the word for settings on the command line."""
    path = None if preset in preset_names() else find_yaml(PRESETS, preset)
    if path is None:
        return preset == LIGHTNING
    tree = read_tree(path)
    model = tree.get("model")
    return bool({"fit", "trainer"} & {*tree}) or (isinstance(model, dict) and "class_path" in model)


def read_tree(path: Path) -> dict[str, Any]:
    """The sections of a YAML file; none where it has no sections, or cannot be read."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, OSError):
        return {}  # the reader of presets, or LightningCLI, reports it
    return tree if isinstance(tree, dict) else {}


def validate(tree: dict[str, Any]) -> Config:
    """Turn a tree of plain values into a `Config`; raise ConfigError with the first problem."""
    config = validate_as(Config, tree, options=False)
    check_own(config)
    return config


def check_own(config: Config) -> None:
    """Raise ConfigError if the user's own source and model are not installed or do not fit each other."""
    try:
        config.check_own()
    except ValueError as error:
        raise ConfigError(str(error)) from error


def validate_as(kind: type[M], tree: dict[str, Any], *, options: bool = True) -> M:
    """Turn a tree of plain values into any model, whose fields may be options; raise ConfigError for a problem."""
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise _refusal(error, options=options) from error


@cache
def field_paths() -> tuple[str, ...]:
    """All dotted field paths, in the order of the schema."""
    return tuple(flatten(Config()))


def flatten(config: BaseModel) -> dict[str, Any]:
    """Values of all fields by dotted path."""
    return {path: value for path, _, value in walk(config)}


def walk(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, FieldInfo, Any]]:
    """All fields in the order of the schema, each with its dotted path and its value."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from walk(value, f"{prefix}{name}.")
        else:
            yield prefix + name, field, value


def _read_preset(preset: str) -> dict[str, Any]:
    path = find_yaml(PRESETS, preset)
    if path is None:
        near = suggest(preset, preset_names())
        hint = (f"did you mean {near}? Else " if near else "") + "list the presets with: paceline presets"
        raise ConfigError(f"no preset or file is called {preset}", hint=hint, setting="preset")
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        fault = f"preset {path} cannot be read as YAML ({' '.join(str(error).split())})"
        raise ConfigError(fault, hint="fix the file", setting="preset") from error
    if not isinstance(tree, dict):
        fault = f"preset {path} does not hold sections of settings"
        raise ConfigError(fault, hint="print a preset as an example with: paceline run digits --show", setting="preset")
    for key in field_paths():  # replace the word None, which is a text in YAML, and values of other tools
        *sections, name = key.split(".")
        node: Any = tree
        for section in sections:
            node = node.get(section) if isinstance(node, dict) else None
        if isinstance(node, dict) and isinstance(node.get(name), str):
            text = node[name]
            node[name] = None if _is_nothing(key, text) else VALUE_ALIASES.get(key, {}).get(text, text)
    return tree


def apply(tree: dict[str, Any], *overrides: str) -> dict[str, Any]:
    """Put `key=value` overrides into a tree of plain values; raise ConfigError if a setting does not exist."""
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            near = suggest_setting(key, field_paths())
            hint = f"did you mean {near}=VALUE?" if near else "for example recipe.num_epochs=2"
            raise ConfigError(f"{override} is not of the form SETTING=VALUE", hint=hint, setting=key)
        if key not in field_paths():
            raise ConfigError(f"{key} is not a setting", hint=setting_hint(key), setting=key)
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
            if not isinstance(node, dict):
                fault = f"{override} changes {section}, which the preset gives as a single value"
                raise ConfigError(fault, hint=f"write {section} as a section in the preset", setting=key)
        node[name] = _parse(key, text)
    return tree


def _parse(key: str, text: str) -> Any:
    kinds = _kinds(key)
    if _is_nothing(key, text):
        return None
    if str in kinds:
        return text  # never let YAML turn a path such as 2024, a name such as "on" or 2:00:00 into another type
    text = VALUE_ALIASES.get(key, {}).get(text, text)
    if any(get_origin(kind) is tuple for kind in kinds):  # a,b and (a,b) are [a,b]
        text = text.strip()
        takes_only_lists = all(kind is NoneType or get_origin(kind) is tuple for kind in kinds)
        if text.startswith("(") and text.endswith(")"):
            text = f"[{text[1:-1]}]"
        elif not text.startswith("[") and ("," in text or takes_only_lists):
            text = f"[{text}]"
    return plain_value(key, text)


def split_values(text: str) -> list[str]:
    """The values of `a,b` or `[a,b]`; a comma inside brackets or braces belongs to a value, as in `[2,1],[1,1]`."""
    values, depth = [""], 0
    for sign in text.strip():
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and depth == 0:
            values.append("")
        else:
            values[-1] += sign
    if len(values) == 1 and values[0].startswith("[") and values[0].endswith("]"):
        return split_values(values[0][1:-1])
    return [value.strip() for value in values if value.strip()]


def plain_value(key: str, text: str) -> Any:
    """A number, word or list as YAML reads it, whatever the setting takes; else raise ConfigError."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{key}={text} is not a plain value", hint="quote it as in YAML", setting=key) from error


def _is_nothing(key: str, text: str) -> bool:
    return NoneType in _kinds(key) and text.strip().lower() in NOTHING


@cache
def _kinds(key: str) -> frozenset[object]:
    """The types that a setting takes: each member of a union, without its constraints."""
    (annotation,) = (field.annotation for path, field, _ in walk(Config()) if path == key)
    return frozenset(_members(annotation))


def _members(kind: object) -> Iterator[object]:
    if get_origin(kind) is Annotated:
        yield from _members(get_args(kind)[0])
    elif get_origin(kind) in (Union, UnionType):
        for member in get_args(kind):
            yield from _members(member)
    else:
        yield kind


def setting_hint(key: str) -> str:
    """The hint for a setting that does not exist."""
    return hints.did_you_mean(suggest_setting(key, field_paths()), "list the settings with: paceline settings")


def _refusal(refusal: ValidationError, *, options: bool) -> ConfigError:
    errors = refusal.errors()
    first = next((error for error in errors if error["type"] == "credential"), errors[0])  # whose value stays secret
    key = _key_of(first["loc"])
    if first["type"] == "value_error":
        fault, hint = hints.fault_and_hint(ValueError(first["msg"].removeprefix("Value error, ")))
        return ConfigError(fault, hint=hint, setting=hints.setting_of(fault) or key)
    if first["type"] == "credential":
        fault, _, hint = first["msg"].partition("; ")
        return ConfigError(f"{key} {fault}", hint=hint, setting=key)
    if first["type"] == "extra_forbidden":
        return ConfigError(f"{key} is not a setting", hint=setting_hint(key), setting=key)
    of_key = [error for error in errors if _key_of(error["loc"]) == key]
    if options and "." not in key:
        key = _OPTIONS.get(key, f"--{key.replace('_', '-')}")
    fault, hint = hints.describe_refusal(key, of_key)
    return ConfigError(fault, hint=hint, setting=key)


_OPTIONS = {"num_trials": "--trials", "tuned": "--fine-tune", "kinds": "--kind", "seed": "seed"}
"""Fields of requests whose options have other names."""


def _key_of(location: tuple[int | str, ...]) -> str:
    """The setting that an error is about, without the members of unions and lists that pydantic appends."""
    parts = [str(part) for part in location]
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in field_paths()), ".".join(parts))


def make_config(config: Config, overrides: list[str]) -> Config:
    """A configuration with overrides; raise ConfigError if it is not valid."""
    return validate(apply(config.model_dump(mode="json"), *overrides))


class PlanArm(Section):
    """An arm that does work of its own."""

    overrides: list[Text] = Field(default_factory=list)
    """Settings that differ from what the arms share, as key=value."""
    linear_eval: Text | None = None
    """Layer of the frozen network on whose output a classifier is fitted; None trains the network."""


class StudyPlan(Section):
    """A study to repeat on other data or machines, with either axes or arms."""

    preset: str
    """Name or path of the preset."""
    overrides: list[str] = Field(default_factory=list)
    """Settings that differ from the preset's, as key=value."""
    axes: dict[str, list[Annotated[str, BeforeValidator(str)]]] = Field(default_factory=dict)
    """Setting -> its values, the baseline's first."""
    arms: dict[str, PlanArm] = Field(default_factory=dict)
    """Name -> arm; arms that do different work are compared by the time to the same score."""
    ladder: bool = False
    """Add one factor at a time."""
    repeats: int = Field(default=3, ge=1)
    """Trainings of each arm."""

    @model_validator(mode="after")
    def _has_axes_or_arms(self) -> Self:
        if bool(self.axes) == bool(self.arms):
            raise ValueError("a plan has either axes or arms")
        return self


def plan_names() -> list[str]:
    """Names of the shipped plans."""
    return sorted(path.stem for path in PLANS.glob("*.yaml"))


def load_plan(name: str) -> StudyPlan:
    """Read a plan by name or path; raise ConfigError if it does not exist."""
    path = find_yaml(PLANS, name)
    if path is None:
        near = hints.did_you_mean(suggest(name, plan_names()), f"choices: {', '.join(plan_names())}, or a YAML file")
        raise ConfigError(f"--plan {name} is not a plan or a file", hint=near, setting="--plan")
    try:
        return validate_as(StudyPlan, yaml.safe_load(path.read_text(encoding="utf-8")), options=False)
    except (yaml.YAMLError, UnicodeDecodeError, OSError, ConfigError) as error:
        fault = f"--plan {path} is not a plan ({' '.join(hints.fault_and_hint(error)[0].split())})"
        raise ConfigError(fault, hint="compare it with conf/plans/scaling.yaml", setting="--plan") from error
