"""Reads a preset and its overrides into one `Config`, or says in one line what is wrong."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from paceline.conf.config import Config

PRESETS = Path(__file__).parent / "presets"
DASK_SETTINGS = Path(__file__).parent / "dask" / "dask.yaml"
"""In Dask's own format."""
M = TypeVar("M", bound=BaseModel)
NOTHING = ("", "null", "none", "~")
"""Words that leave an optional setting unset, in any case of their letters."""


class _Loader(yaml.SafeLoader):
    """YAML in which `off`, `on`, `yes` and `no` are words: YAML 1.1 makes `compile: off` a truth value."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class ConfigError(ValueError):
    """The configuration is wrong; the message is one line: value, rule, fix."""


def preset_names() -> list[str]:
    """Names of the shipped presets."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def load(preset: str, overrides: list[str] | None = None) -> Config:
    """Read a preset by name or path and apply `key=value` overrides.

    Raises:
        ConfigError: unknown preset or key, wrong type, impossible combination.
    """
    tree = _read_preset(preset)
    for override in overrides or []:
        apply(tree, override)
    tree.setdefault("name", Path(preset).stem)
    return validate(tree)


def validate(tree: dict[str, Any]) -> Config:
    """Turn a tree of plain values into a `Config`.

    Raises:
        ConfigError: with the first problem on one line.
    """
    config = checked(Config, tree)
    check_own(config)
    return config


def check_own(config: Config) -> None:
    """Look for the packages of the user's own source and model, and ask them whether they fit.

    Raises:
        ConfigError: one is not installed, or they do not fit; with what there is.
    """
    try:
        config.check_own()
    except ValueError as error:
        raise ConfigError(str(error)) from error


def checked(kind: type[M], tree: dict[str, Any]) -> M:
    """Turn a tree of plain values into a model of any kind, such as what a command is asked.

    Raises:
        ConfigError: with the first problem on one line.
    """
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_one_line(error)) from error


def field_paths(model: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """All dotted field paths, in the order of the schema."""
    paths: list[str] = []
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            paths += field_paths(field.annotation, f"{prefix}{name}.")
        else:
            paths.append(prefix + name)
    return paths


def flatten(config: BaseModel, prefix: str = "") -> dict[str, Any]:
    """Values of all fields by dotted path."""
    flat: dict[str, Any] = {}
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _read_preset(preset: str) -> dict[str, Any]:
    path = PRESETS / f"{preset}.yaml"
    if not os.path.isfile(path):  # noqa: PTH113  which takes any text, however long
        path = Path(preset)
    if not os.path.isfile(path):  # noqa: PTH113
        raise ConfigError(
            f"preset {preset!r} is neither one of {', '.join(preset_names())} nor a file; "
            "name one of them or a YAML file"
        )
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(
            f"preset {path} cannot be read as YAML ({' '.join(str(error).split())}); mend the file"
        ) from error
    if not isinstance(tree, dict):
        raise ConfigError(
            f"preset {path} holds {type(tree).__name__}, not a mapping of sections; see conf/presets/digits.yaml"
        )
    for key in field_paths():
        _unset(tree, key)
    return tree


def _unset(tree: dict[str, Any], key: str) -> None:
    """Replace the word None, which is a text in YAML, where it leaves an optional setting unset."""
    *sections, name = key.split(".")
    node: Any = tree
    for section in sections:
        node = node.get(section) if isinstance(node, dict) else None
    if isinstance(node, dict) and isinstance(node.get(name), str) and _is_nothing(key, node[name]):
        node[name] = None


def apply(tree: dict[str, Any], override: str) -> None:
    """Put a `key=value` override into a tree of plain values.

    Raises:
        ConfigError: it has another form, or there is no such setting.
    """
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r} is not of the form key=value; for example recipe.num_epochs=2")
    _check_known(key)
    *sections, name = key.split(".")
    node = tree
    for section in sections:
        node = node.setdefault(section, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {override!r} goes into {section}, which is not a section of the preset")
    node[name] = _parse(key, text)


def _parse(key: str, text: str) -> Any:
    if _is_nothing(key, text):
        return None
    if str in _kinds(key):
        return text  # never let YAML turn a path such as 2024, a name such as "on" or 2:00:00 into another type
    return plain_value(key, text)


def plain_value(key: str, text: str) -> Any:
    """A number, word or list as YAML reads it, whatever the setting takes.

    Raises:
        ConfigError: it is none.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{key}={text} is not a plain value; quote it as YAML would") from error


def _is_nothing(key: str, text: str) -> bool:
    return NoneType in _kinds(key) and text.strip().lower() in NOTHING


@cache
def _kinds(key: str) -> frozenset[object]:
    """The types that a setting takes: each member of a union, without its constraints."""
    model: type[BaseModel] = Config
    *sections, name = key.split(".")
    for section in sections:
        inner = model.model_fields[section].annotation
        assert isinstance(inner, type)
        assert issubclass(inner, BaseModel)
        model = inner
    return frozenset(_members(model.model_fields[name].annotation))


def _members(kind: object) -> Iterator[object]:
    if get_origin(kind) is Annotated:
        yield from _members(get_args(kind)[0])
    elif get_origin(kind) in (Union, UnionType):
        for member in get_args(kind):
            yield from _members(member)
    else:
        yield kind


def _check_known(key: str) -> None:
    known = field_paths()
    if key in known:
        return
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}?" if close else "see paceline run --help"
    raise ConfigError(f"{key} is not a setting; {hint}")


def _one_line(error: ValidationError) -> str:
    errors = error.errors()
    first = next((one for one in errors if one["type"] == "credential"), errors[0])  # whose value is not to be told
    key = _key_of(first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return message
    if first["type"] == "credential":
        return f"{key} {message}"
    if first["type"] == "extra_forbidden":
        close = difflib.get_close_matches(key, field_paths(), n=1, cutoff=0.5)
        return f"{key} is not a setting; " + (f"did you mean {close[0]}?" if close else "see paceline run --help")
    kinds = dict.fromkeys(one["msg"] for one in errors if _key_of(one["loc"]) == key)  # each that a union allows
    rules = ", or ".join(f"{message[0].lower()}{message[1:]}" for message in kinds)
    return f"{key}={first['input']!r}: {rules}; see paceline run --help"


def _key_of(location: tuple[int | str, ...]) -> str:
    """The setting that an error is about."""
    parts = (str(part) for part in location)
    return _trim_union(".".join(part for part in parts if "literal" not in part and "constrained" not in part))


def _trim_union(key: str) -> str:
    """Drop the names of union members that pydantic appends to a location, such as `.int`."""
    known = set(field_paths())
    while key and key not in known and "." in key:
        shorter = key.rpartition(".")[0]
        if not any(path == shorter or path.startswith(shorter + ".") for path in known):
            break
        if shorter not in known:
            break
        key = shorter
    return key


def make_config(config: Config, overrides: list[str]) -> Config:
    """A configuration with overrides.

    Raises:
        ConfigError: the result is not valid.
    """
    tree = config.model_dump(mode="json")
    for override in overrides:
        apply(tree, override)
    return validate(tree)
