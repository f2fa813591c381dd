"""Settings of LightningCLI as plain values: JSON, in which they travel, has no objects, inf, nan or numbers as keys."""

import math
from typing import Any

from paceline.tasks.errors import InputError

_OBJECT = "Unable to serialize instance "  # text that jsonargparse (4.53) writes for an object


def without_objects(dumped: Any, parsed: Any) -> Any:
    """Settings without arguments that hold an object. It is a default of the code, which each rank takes there."""
    from jsonargparse import Namespace

    if isinstance(parsed, list | tuple) and isinstance(dumped, list):
        return [without_objects(*each) for each in zip(dumped, parsed, strict=True)]
    is_class = isinstance(parsed, Namespace)
    if not (isinstance(parsed, Namespace | dict) and isinstance(dumped, dict)):
        return dumped
    items = vars(parsed) if is_class else {str(name): value for name, value in parsed.items()}
    plain = {name: without_objects(value, items.get(name)) for name, value in dumped.items()}
    return {name: value for name, value in plain.items() if not (is_class and _OBJECT in str(value))}


def as_texts(dumped: Any) -> Any:
    """Settings with inf and nan as the texts of YAML: JSON has neither, and LightningCLI reads these as numbers."""
    if isinstance(dumped, dict):
        return {name: as_texts(value) for name, value in dumped.items()}
    if isinstance(dumped, list):
        return [*map(as_texts, dumped)]
    if isinstance(dumped, float) and not math.isfinite(dumped):
        return ".nan" if math.isnan(dumped) else ".inf" if dumped > 0 else "-.inf"
    return dumped


def _items(value: Any) -> dict[Any, Any]:
    """What a value holds, by its name, key or index."""
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    return value if isinstance(value, dict) else vars(value) if type(value).__name__ == "Namespace" else {}


def is_special(value: Any) -> bool:
    """Whether a value holds inf, nan or a key that is not a text, which JSON changes."""
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
        return True
    return any(map(is_special, _items(value).values()))


def leave_changed(tree: Any, parsed: Any, again: Any, given: Any, place: str) -> bool:
    """Whether special values of parsed settings differ in those that were parsed again from the tree.

    Such arguments of classes are removed from the tree: each rank takes their defaults from the code.

    Raises InputError: one of them is given.
    """
    if isinstance(parsed, float):
        return not math.isfinite(parsed) and repr(parsed) != repr(again)
    parts, parts_again, named = _items(parsed), _items(again), _items(given)
    is_class = type(parsed).__name__ == "Namespace"
    if isinstance(parsed, dict) and is_special(dict.fromkeys(parts)) and parts.keys() != parts_again.keys():
        return True
    parts_of_tree = _items(tree)
    changed = []
    for name, value in parts.items():
        if is_class and name not in parts_of_tree:
            continue
        where = f"{place}.{name}".lstrip(".")
        if leave_changed(parts_of_tree.get(name), value, parts_again.get(name), named.get(name), where):
            changed.append(name)
            if is_class and name in named:
                fault = f"{where}={value!r} would change on its way to the ranks, which get the settings as JSON"
                hint = f"give {name} the type of its values in your class, for example dict[int, str] or list[float]"
                raise InputError(fault, hint=hint, setting=where)
            if is_class:
                del tree[name]
    return bool(changed) and not is_class
