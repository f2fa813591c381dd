"""What a loader does in this process: the generators that it may draw from, and the user's code in its sampler."""

import gc
from collections.abc import Iterator
from functools import partial
from itertools import islice
from types import CodeType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from paceline.tasks.train.lightning.random_state import OTHERS, restore, state_of
from paceline.tasks.train.user_code import is_of_user

MAX_OBJECTS = 20_000
"""Objects that are looked at. Those of a large data set come after what is near."""
LEAVES = str, bytes, int, float, complex, bool, type(None), torch.Tensor, np.ndarray, ModuleType
ROOTS = "dataset", "sampler", "batch_sampler", "collate_fn", "generator"
KINDS = torch.Generator, *OTHERS
SOURCES = tuple, FunctionType, MethodType, partial
"""Types of what an iterator takes values from, next to other iterators and callable objects of the user's."""
DRAW_AT_START = "accelerate"
"""Third party whose samplers draw random numbers only before the first batch of an epoch."""


class Generators:
    """The generators that the objects of a loader, their classes, and the functions of these refer to."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._found = [each for each in islice(_reached(loader), MAX_OBJECTS) if issubclass(type(each), KINDS)]

    def states(self) -> list[Any]:
        """Their states, in plain types."""
        return [
            each.get_state().tolist() if isinstance(each, torch.Generator) else state_of(each) for each in self._found
        ]

    def set_states(self, states: list[Any]) -> None:
        """Restore their `states`."""
        for each, state in zip(self._found, states, strict=True):
            if isinstance(each, torch.Generator):
                each.set_state(torch.tensor(state, dtype=torch.uint8))
            else:
                restore(each, state)


def runs_user_code(iterator: Any) -> bool:
    """Whether the next value of an iterator takes code of the user's, such as a generator function of a sampler.

    An iterator over a list takes none: the code that made the list has ended.
    """
    queue = [iterator]
    seen = {id(iterator)}
    for each in queue:
        if isinstance(each, GeneratorType):
            name = each.gi_frame.f_globals.get("__name__") if each.gi_frame is not None else None
        else:
            name = each.__module__ if isinstance(each, FunctionType) else type(each).__module__
        if isinstance(name, str) and is_of_user(name) and name.partition(".")[0] != DRAW_AT_START:
            return True
        for one in gc.get_referents(each):
            is_source = isinstance(one, SOURCES) or hasattr(type(one), "__next__")
            if id(one) not in seen and (is_source or (callable(one) and is_of_user(type(one).__module__))):
                seen.add(id(one))
                queue.append(one)
    return False


def _reached(loader: Any) -> Iterator[Any]:
    """Objects from near to far."""
    queue = [getattr(loader, name, None) for name in ROOTS]
    seen = {id(each) for each in queue}
    for each in queue:
        yield each
        for one in _inside(each):
            if id(one) not in seen:
                seen.add(id(one))
                queue.append(one)


def _inside(each: Any) -> list[Any]:
    """What an object refers to. Of a class: its variables, methods and properties; of a function: what it names."""
    kind = type(each)
    if issubclass(kind, (*LEAVES, *KINDS)):
        return []
    if issubclass(kind, type):
        return [value for base in each.__mro__ if _may_enter(base) for value in vars(base).values()]
    if issubclass(kind, FunctionType):
        return [*_named_by(each), each.__closure__, each.__defaults__, each.__kwdefaults__] if _may_enter(each) else []
    return [*gc.get_referents(each), kind]


def _named_by(function: FunctionType) -> list[Any]:
    """The variables of modules that a function names, also in functions and comprehensions inside of it."""
    codes, names = [function.__code__], set[str]()
    for code in codes:
        names.update(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    values = [function.__globals__[name] for name in sorted(names & function.__globals__.keys())]
    modules = [value for value in values if issubclass(type(value), ModuleType) and _may_enter(value)]
    return values + [vars(module)[name] for module in modules for name in sorted(names & vars(module).keys())]


def _may_enter(owner: Any) -> bool:
    """Whether a class, a function or a module is neither of Python nor of an engine: the user's, or a third party's."""
    module = owner.__name__ if isinstance(owner, ModuleType) else owner.__module__
    return isinstance(module, str) and is_of_user(module)
