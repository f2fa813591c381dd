"""Settings of LightningCLI as plain values: ranks get them as JSON, without objects, inf, nan and numbers as keys."""

import math
from typing import Any

from paceline.tasks.errors import InputError

_OBJECT = "Unable to serialize instance "  # text that jsonargparse (4.53) writes for an object


def without_objects(dumped: Any, parsed: Any) -> Any:
    """Settings without arguments that hold an object. It is a default of the code, which each rank takes there."""
    if isinstance(parsed, list | tuple) and isinstance(dumped, list):
        return [without_objects(*each) for each in zip(dumped, parsed, strict=True)]
    is_class = type(parsed).__name__ == "Namespace"
    if not ((is_class or isinstance(parsed, dict)) and isinstance(dumped, dict)):
        return dumped
    items = {str(name): value for name, value in _items(parsed).items()}
    plain = {name: without_objects(value, items.get(name)) for name, value in dumped.items()}
    return {name: value for name, value in plain.items() if not (is_class and _OBJECT in str(value))}


def with_yaml_numbers(dumped: Any) -> Any:
    """Settings with inf and nan as YAML writes them: JSON has neither. LightningCLI reads these texts as numbers."""
    if isinstance(dumped, dict):
        return {name: with_yaml_numbers(value) for name, value in dumped.items()}
    if isinstance(dumped, list):
        return [*map(with_yaml_numbers, dumped)]
    if isinstance(dumped, float) and not math.isfinite(dumped):
        return ".nan" if math.isnan(dumped) else ".inf" if dumped > 0 else "-.inf"
    return dumped


def _items(value: Any) -> dict[Any, Any]:
    """What a value holds, by its name, key or index."""
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    return value if isinstance(value, dict) else vars(value) if type(value).__name__ == "Namespace" else {}


def holds_special(value: Any) -> bool:
    """Whether a value holds what JSON cannot represent: inf, nan, or a key of a dict that is not a text."""
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
        return True
    return any(map(holds_special, _items(value).values()))


def remove_changed(tree: Any, parsed: Any, again: Any, given: Any, place: str) -> bool:
    """Remove arguments of classes from the tree whose special values JSON has changed; ranks take their defaults.

    `again` are the settings parsed from the tree, `given` those that the user named, and `place` is their key. Returns
    whether the value itself has changed, so that the argument around it must be removed.

    Raises InputError: the user has named such an argument.
    """
    if isinstance(parsed, float):
        return not math.isfinite(parsed) and repr(parsed) != repr(again)
    parts, parts_again, named = _items(parsed), _items(again), _items(given)
    is_class = type(parsed).__name__ == "Namespace"
    if isinstance(parsed, dict) and holds_special(dict.fromkeys(parts)) and parts.keys() != parts_again.keys():
        return True
    parts_of_tree = _items(tree)
    changed = []
    for name, value in parts.items():
        if is_class and name not in parts_of_tree:
            continue
        where = f"{place}.{name}".lstrip(".")
        if remove_changed(parts_of_tree.get(name), value, parts_again.get(name), named.get(name), where):
            changed.append(name)
            if is_class and name in named:
                fault = f"{where}={value!r} would change on its way to the ranks, which get the settings as JSON"
                hint = f"give {name} the type of its values in your class, for example dict[int, str] or list[float]"
                raise InputError(fault, hint=hint, setting=where)
            if is_class:
                del tree[name]
    return bool(changed) and not is_class
