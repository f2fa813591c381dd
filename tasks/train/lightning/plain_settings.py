"""Settings of LightningCLI as plain values: ranks get them as JSON, without objects, inf, nan and numbers as keys."""

import copy
import inspect
import math
from enum import Enum
from pkgutil import resolve_name
from typing import Any

from paceline.conf.hints import did_you_mean, suggest
from paceline.tasks.errors import InputError

_OBJECT = "Unable to serialize instance "  # text that jsonargparse (4.53) writes for an object
_FILE, _ALL_FILES = "__path__", "config"  # names that jsonargparse adds for the files of a value and of all settings
_MARK = "\u200b"  # jsonargparse (4.53) puts it before names that are methods of its Namespace, for example `keys`
_PLAIN = (str, bool, int, float, type(None))


def without_objects(dumped: Any, parsed: Any) -> Any:
    """Settings without arguments that hold an object. It is a default of the code, which each rank takes there.

    Plain values are those parsed: jsonargparse (4.53) writes other ones for texts without a type, which it reads as
    YAML once more, and for values that are not the callable that their type accepts too.
    """
    if type(parsed) in _PLAIN:
        return parsed
    if isinstance(parsed, Enum):
        return parsed.name
    if isinstance(parsed, set | frozenset):
        return [*parsed] if all(type(each) in _PLAIN for each in parsed) else dumped
    if isinstance(parsed, tuple) and hasattr(parsed, "_asdict"):
        parsed = parsed._asdict()
    if isinstance(parsed, list | tuple):
        parts = dumped if isinstance(dumped, list) else [_OBJECT] * len(parsed)
        return [without_objects(*each) for each in zip(parts, parsed, strict=True)]
    if not (_is_class(parsed) or isinstance(parsed, dict)):
        return dumped
    items = _by_text(parsed)
    written = dumped if isinstance(dumped, dict) else dict.fromkeys(items, _OBJECT)
    plain = {name: without_objects(value, items.get(name, value)) for name, value in written.items()}
    return {name: value for name, value in plain.items() if not (_is_class(parsed) and _OBJECT in str(value))}


def copied(parsed: Any) -> Any:
    """Settings that can be dumped without a change of those parsed: jsonargparse (4.53) dumps tuples in place."""
    if type(parsed) in (list, tuple):
        return type(parsed)(map(copied, parsed))
    if type(parsed) is dict:
        return {name: copied(value) for name, value in parsed.items()}
    if not _is_class(parsed):
        return parsed
    made = copy.copy(parsed)
    vars(made).update({name: copied(value) for name, value in vars(parsed).items()})
    return made


def with_yaml_numbers(dumped: Any) -> Any:
    """Settings with inf and nan as YAML writes them: JSON has neither. LightningCLI reads these texts as numbers."""
    if isinstance(dumped, dict):
        return {name: with_yaml_numbers(value) for name, value in dumped.items()}
    if isinstance(dumped, list):
        return [*map(with_yaml_numbers, dumped)]
    if isinstance(dumped, float) and not math.isfinite(dumped):
        return ".nan" if math.isnan(dumped) else ".inf" if dumped > 0 else "-.inf"
    return dumped


def _is_class(value: Any) -> bool:
    """Whether a value is the arguments of a class, or the path of a class with its arguments."""
    return type(value).__name__ == "Namespace"


def _items(value: Any) -> dict[Any, Any]:
    """What a value holds, by its name, key or index."""
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if _is_class(value):
        return {name.removeprefix(_MARK): each for name, each in vars(value).items()}
    return value if isinstance(value, dict) else {}


def _by_text(value: Any) -> dict[str, Any]:
    """What a value holds, by its name, key or index as text: so they are in the plain settings."""
    return {str(name): each for name, each in _items(value).items()}


def refuse_objects(tree: Any, parsed: Any, given: Any, place: str) -> None:
    """Raise InputError: an argument that the user has named is not in the tree, because it holds an object."""
    parts, named = _by_text(tree), _items(given)
    for name, value in _items(parsed).items():
        where = f"{place}.{name}".lstrip(".")
        if name not in named or name == _FILE or where == _ALL_FILES:
            continue
        if _is_class(parsed) and name not in parts:
            fault = f"{where}={value!r} is an object, which cannot be written into the settings that the ranks get"
            hint = f"give {where} a class path with init_args, or make the object the default of the argument"
            raise InputError(fault, hint=hint, setting=where)
        refuse_objects(parts.get(str(name)), value, named[name], where)


def refuse_unknown(parsed: Any, place: str) -> None:
    """Raise InputError: `dict_kwargs` of a class name an argument that it does not take."""
    items = _items(parsed)
    path, given = items.get("class_path"), items.get("dict_kwargs")  # an argument may be named dict_kwargs too
    if _is_class(parsed) and isinstance(path, str) and isinstance(given, dict):
        arguments = inspect.signature(resolve_name(path)).parameters
        takes_all = any(each.kind is each.VAR_KEYWORD for each in arguments.values())
        for name in () if takes_all else (each for each in given if each not in arguments):
            where = f"{place}.dict_kwargs.{name}"
            hint = did_you_mean(suggest(name, [*arguments]), f"its arguments are: {', '.join(arguments) or 'none'}")
            raise InputError(f"{where} is not an argument of {path}", hint=hint, setting=where)
    for name, value in items.items():
        refuse_unknown(value, f"{place}.{name}".lstrip("."))


def _has_changed(parsed: Any, again: Any) -> bool:
    """Whether a value that is parsed again is another one; objects are compared by their type alone."""
    if _is_class(parsed) and not _items(parsed):  # no arguments, which jsonargparse may leave out
        return bool(_items(again))
    if type(parsed) is int and type(again) is float:  # a default that its type makes a float
        return parsed != again
    if type(parsed) is not type(again) or (isinstance(parsed, list | tuple | dict) and len(parsed) != len(again)):
        return True
    return type(parsed) in _PLAIN and repr(parsed) != repr(again)


def remove_changed(tree: Any, parsed: Any, again: Any, given: Any, place: str) -> bool:
    """Remove arguments of classes from the tree whose values JSON has changed; ranks take their defaults.

    `again` are the settings parsed from the tree, `given` those that the user named, and `place` is their key. Returns
    whether the value itself has changed, so that the argument around it must be removed.

    Raises InputError: the user has named such an argument.
    """
    if _has_changed(parsed, again):
        return True
    parts, parts_again, named = _items(parsed), _items(again), _items(given)
    is_class, written = _is_class(parsed), _by_text(tree)
    if isinstance(parsed, dict) and parts.keys() != parts_again.keys():
        return True
    changed = []
    for name, value in parts.items():
        if is_class and name not in written:
            continue
        where = f"{place}.{name}".lstrip(".")
        if remove_changed(written.get(str(name)), value, parts_again.get(name), named.get(name), where):
            changed.append(name)
            if is_class and name in named:
                fault = f"{where}={value!r} would change on its way to the ranks, which get the settings as JSON"
                hint = f"give {name} the type of its values in your class, for example dict[int, str] or list[float]"
                raise InputError(fault, hint=hint, setting=where)
            if is_class:
                del tree[name]
    return bool(changed) and not is_class
