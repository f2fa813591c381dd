"""States of the generators of random numbers of a process and of a loader."""

import random
from typing import Any

import numpy as np
import torch

RandomState = dict[str, Any]
"""States of all generators of random numbers, in plain types and tensors."""
OTHERS = random.Random, np.random.Generator, np.random.RandomState


def differ(before: RandomState, after: RandomState) -> bool:
    """Whether random numbers were drawn between two states."""
    devices = {"torch", "cuda"} & before.keys() & after.keys()
    first, second = ([*map(state.get, sorted(devices)), *state["loader"]] for state in (before, after))
    is_drawn = len(first) != len(second)  # a loader may make a generator when it first needs one
    is_drawn |= any(before[name] != after[name] for name in ("python", "numpy", "own"))
    return is_drawn or any(not torch.equal(one, other) for one, other in zip(first, second, strict=True))


def random_state(loader: Any) -> RandomState:
    """The state of Python's, NumPy's and torch's generators, and of those that a loader has itself."""
    version, words, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()
    state: RandomState = {
        "python": [version, list(words), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state(),
        "loader": [generator.get_state() for generator in _owned(loader, torch.Generator)],
        "own": [state_of(generator) for generator in _owned(loader, *OTHERS)],
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
    for generator, own in zip(_owned(loader, torch.Generator), state["loader"], strict=False):
        generator.set_state(own)
    for generator, own in zip(_owned(loader, *OTHERS), state.get("own", ()), strict=False):  # none of earlier versions
        restore(generator, own)


def _owned(loader: Any, *kinds: type) -> list[Any]:
    """Generators that are attributes of a loader, its samplers or its dataset, or of what is inside of these."""
    owners = [loader, *(getattr(loader, name, None) for name in ("sampler", "batch_sampler", "dataset"))]
    values = [getattr(loader, "generator", None)]  # which may be a property
    for owner in owners:
        attributes = getattr(owner, "__dict__", {})
        values += attributes.values()
        inner = (attributes.get(name) for name in ("dataset", "sampler", "_sampler"))  # of a subset, or a wrapper
        owners += [each for each in inner if all(each is not one for one in owners)]
    return list({id(value): value for value in values if type(value) in kinds}.values())


def state_of(generator: Any) -> Any:
    """The state of a generator of Python or NumPy, in plain types."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    is_legacy = isinstance(generator, np.random.RandomState)
    return _listed(generator.get_state(legacy=False) if is_legacy else generator.bit_generator.state)


def _listed(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _listed(value) for name, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray) else state


def restore(generator: Any, state: Any) -> None:
    """Restore a `state_of` a generator."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state
