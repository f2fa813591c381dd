"""Generators of random numbers of the user's code that a loader may draw from in the process of the training."""

import gc
import sys
from collections.abc import Iterator
from itertools import islice
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from paceline.tasks.train.lightning.random_state import OTHERS, state_of

MAX_OBJECTS = 20_000
"""Objects that are looked at. Those of a large data set come after what is near."""
LEAVES = str, bytes, int, float, complex, bool, type(None), torch.Tensor, np.ndarray, ModuleType, type
ROOTS = "dataset", "sampler", "batch_sampler", "collate_fn", "generator"
NOT_USERS = sys.stdlib_module_names - {"__main__"} | {"torch", "numpy", "lightning", "paceline"}
"""Packages whose functions are not entered."""
KINDS = torch.Generator, *OTHERS


class Generators:
    """The generators that the objects of a loader, and the functions of the user's classes, refer to."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._found = [each for each in islice(_reached(loader), MAX_OBJECTS) if issubclass(type(each), KINDS)]

    def states(self) -> list[Any]:
        """Their states, in plain types."""
        return [
            each.get_state().tolist() if isinstance(each, torch.Generator) else state_of(each) for each in self._found
        ]


def _reached(loader: Any) -> Iterator[Any]:
    """Objects from near to far. Modules are not entered, except the variables of the user's functions."""
    queue = [getattr(loader, name, None) for name in ROOTS]
    seen = {id(each) for each in queue}
    for each in queue:
        yield each
        if issubclass(type(each), (*LEAVES, *KINDS)):
            continue
        if isinstance(each, FunctionType):
            further = [*_globals_of(each), each.__closure__, each.__defaults__] if _is_users(each.__module__) else []
        else:
            methods = [function for kind in type(each).__mro__ for function in vars(kind).values()]
            further = [function for function in methods if isinstance(function, FunctionType)]
            further = [*gc.get_referents(each), *further]
        for one in further:
            if id(one) not in seen:
                seen.add(id(one))
                queue.append(one)


def _globals_of(function: FunctionType) -> list[Any]:
    """Variables of its module that a function names."""
    return [function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__]


def _is_users(module: str | None) -> bool:
    """Whether a module is the user's, and neither Python's own nor an engine's."""
    return (module or "").partition(".")[0] not in NOT_USERS
