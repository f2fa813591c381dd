"""What LightningCLI refuses, in Paceline's words."""

import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pkgutil import resolve_name

from paceline.conf.hints import did_you_mean, suggest
from paceline.tasks.errors import InputError, one_line
from paceline.tasks.train.user_code import find_user_error

_KEY = re.compile(
    r"""(?:\A.*?|class_path '[^']+':\s+)Parser key "([\w.]+)\""""
)  # the first one, and those inside of a class
_PATH = re.compile(r"Problem with given class_path '([^']+)'")
_IMPORT = re.compile(r"(No module named '[^']+'|module '([^']+)' has no attribute '([^']+)')")
_OTHER_CLASS = re.compile(r"Import path (?:(\S+) )?does not correspond to a subclass of (\w+)")
_OPTION = re.compile(
    r"(?:Group '([\w.]+)' does not accept option|Option) '([\w.]+\+?)'|unrecognized arguments: --([\w.]+\+?)"
)
_MISPLACED = re.compile(r"\{'class_path': '([^']+)', '(?!(?:init_args|dict_kwargs)')(\w+)'")  # not in init_args
_REQUIRED = re.compile(r"arguments are required: ([\w., ]+)")
_EXPECTED = re.compile(r"Expected an? (.*)\. Got value: (.*)")
_TYPES = re.compile(r"Subtypes: \[(.*)\]")  # the forms of a union
_CLASS = re.compile(r"<class '(?:\w+\.)*(\w+)'>")
_LITERAL = re.compile(r"typing\.Literal\[(.*?)\]")
_MEMBERS = re.compile(r"member of <enum '\w+'>: \{(.*)\}")
_GIVEN = re.compile(r"Given value: (?!NestedArg|Namespace)(.*)")


@contextmanager
def own_refusals() -> Iterator[None]:
    """Raise errors of jsonargparse as InputError; all others are the user's own."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ != "ArgumentError":
            raise
        found = find_user_error(error)
        if found is None or not found.is_import or _IMPORT.search(str(error)):
            raise _refusal(str(error)) from error
        raise InputError(f"importing your code raised {found}", hint=found.hint) from error


def _refusal(message: str) -> InputError:
    """An error of jsonargparse (4.53) as fault and hint."""
    if found := _IMPORT.search(message):
        return _failed_import(found)
    name, given = _key_of(message) or "this setting", _GIVEN.search(message)
    if found := _OTHER_CLASS.search(message):
        fault = f"{name}.class_path={found[1] or (given and given[1])} is not a {found[2]}"
        return InputError(fault, hint=f"name a subclass of {found[2]}", setting=f"{name}.class_path")
    option, misplaced = _OPTION.search(message), _MISPLACED.search(given[1]) if given else None
    if misplaced and (option is None or option[2] == "class_path"):
        path, argument = misplaced.groups()
        fault = f"{name}.{argument} is next to class_path, but arguments of {path} must be inside of init_args"
        hint = f"write {{class_path: {path}, init_args: {{{argument}: VALUE}}}}"
        return InputError(fault, hint=hint, setting=f"{name}.{argument}")
    if option:
        return _unknown_option(option)
    if found := _REQUIRED.search(message):
        owners = _PATH.findall(message)
        absent = [f"{name}.init_args.{option}" if owners else option for option in found[1].split(", ")]
        fault = f"{' and '.join(absent)} {'is' if len(absent) == 1 else 'are'} missing"
        if owners:
            fault += f" in the settings of {owners[-1]}"
        example = {"model": "model.class_path=acme.lit.Tagger"}
        hint = "add " + " ".join(example.get(each, f"{each}=VALUE") for each in absent)
        return InputError(fault, hint=hint, setting=absent[0])
    inner = _innermost(message)
    forms, expected, given = _TYPES.search(inner), _EXPECTED.search(inner), _GIVEN.search(inner)
    text = given[1] if given and forms else expected[2] if expected else None
    kind = forms[1] if forms else expected[1] if expected else None
    rule = _rule(kind) if kind else f"is not valid ({one_line(ValueError(inner))[:200]})"
    typed = name if text is None else f"{name}={text.strip()}"
    return InputError(f"{typed} {rule}", hint=f"give {name} another value", setting=name)


def _key_of(message: str) -> str:
    """The key of the setting that the end of a message is about."""
    return ".init_args.".join(_KEY.findall(message))


def _innermost(message: str) -> str:
    """What a message says about the innermost setting; the lines after it, with less indentation, are about others."""
    text = message[max([0, *(match.end() for match in _KEY.finditer(message))]) :].removeprefix(": ")
    lines = [line for line in text.splitlines() if line.strip(" :")]
    indentation = " " * (len(text := "".join(lines[:1])) - len(text.lstrip()))
    return "\n".join(takewhile(lambda line: line.startswith(indentation), lines))


def _failed_import(found: re.Match[str]) -> InputError:
    """A class, or the code of one, that cannot be imported."""
    before = found.string[: found.start()]
    class_path, setting = ["", *_PATH.findall(before)][-1], f"{_key_of(before)}.class_path"
    fault = f"{setting}={class_path} cannot be imported ({found[1]})"
    hint = "check its name, install its package, or give the directory that holds it: --code DIR"
    owner, absent = found[2] or "", found[3]
    if owner in sys.modules and class_path == f"{owner}.{absent}":
        classes = [name for name, value in vars(sys.modules[owner]).items() if isinstance(value, type)]
        named = suggest(absent, classes)
        hint = f"use {setting}={owner}.{named}" if named else f"name a class that {owner} has"
    elif owner and not class_path.startswith(f"{owner}."):  # an error of the code that was being imported
        hint = f"fix the code of {class_path.rpartition('.')[0]}, or of what it imports"
    return InputError(fault, hint=hint, setting=setting)


def _unknown_option(found: re.Match[str]) -> InputError:
    """A setting that nothing has, or one that is extended with += and is not a list."""
    before, given = found.string[: found.start()], found[2] or found[3]
    option, paths = given.removesuffix("+"), _PATH.findall(before)
    name = f"{_key_of(before)}.init_args.{option}" if paths else f"{found[1]}.{option}" if found[1] else option
    names = list(inspect.signature(resolve_name(paths[-1])).parameters) if paths else [option]
    if option != given and option in names:
        fault = f"{name} is not a list, and only a list can be extended with +="
        return InputError(fault, hint=f"use {name}=VALUE", setting=name)
    if not paths:
        return InputError(f"LightningCLI has no setting {name}", hint=f"remove {name}", setting=name)
    hint = did_you_mean(suggest(option, names), f"its arguments are: {', '.join(names) or 'none'}")
    return InputError(f"{name} is not an argument of {paths[-1]}", hint=hint, setting=name)


def _rule(types: str) -> str:
    """The rule for a value, by the types that jsonargparse names."""
    if members := _MEMBERS.search(types):
        return f"must be one of {members[1].replace(',', ', ')}"
    choices = [choice for found in _LITERAL.findall(types) for choice in found.split(", ")]
    names = re.split(r", (?![^\[]*\])", _CLASS.sub(r"\1", types).replace("NoneType", "null"))
    others = [name for name in names if not _LITERAL.fullmatch(name)]
    if not choices:
        return f"must be of type {' or '.join(others)}"
    return " or ".join([f"must be one of {', '.join(dict.fromkeys(choices))}", *others])
