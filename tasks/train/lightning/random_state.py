"""States of the generators of random numbers of a process and of a loader."""

import random
from typing import Any

import numpy as np
import torch

RandomState = dict[str, Any]
"""States of all generators of random numbers, in plain types and tensors."""


def differ(before: RandomState, after: RandomState) -> bool:
    """Whether random numbers were drawn between two states."""
    devices = {"torch", "cuda"} & before.keys() & after.keys()
    first, second = ([*map(state.get, sorted(devices)), *state["loader"]] for state in (before, after))
    is_drawn = any(before[name] != after[name] for name in ("python", "numpy"))
    return is_drawn or any(not torch.equal(one, other) for one, other in zip(first, second, strict=True))


def random_state(loader: Any) -> RandomState:
    """The state of Python's, NumPy's and torch's generators, and of those that a loader has itself."""
    version, words, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()
    state: RandomState = {
        "python": [version, list(words), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state(),
        "loader": [generator.get_state() for generator in _generators(loader)],
    }
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {})


def set_random_state(state: RandomState, loader: Any) -> None:
    """Restore a `random_state`."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    for generator, own in zip(_generators(loader), state["loader"], strict=False):
        generator.set_state(own)


def _generators(loader: Any) -> list[torch.Generator]:
    samplers = [getattr(loader, name, None) for name in ("sampler", "batch_sampler")]
    owned = {
        id(one): one
        for each in (loader, *samplers)
        if isinstance(one := getattr(each, "generator", None), torch.Generator)
    }
    return list(owned.values())
