"""Weights from files: those of a trained model, and pretrained ones, which are checked against the network.

They are read as tensors only: no code in them is executed. The same weights have several names: a wrapper puts its own
before each parameter's. Names are compared without what all of them begin with. All must fit except the heads, which
are reinitialised for other classes.
"""

import hashlib
import io
import pickle
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.conf.model import Model
from paceline.tasks.errors import InputError, one_line
from paceline.tasks.model.networks.registry import build_network
from paceline.tasks.model.transfer import heads_of, part_of
from paceline.tasks.model_bundle import WEIGHTS, read_model
from paceline.tasks.records.data import ModelFacts, PreparedSet, Pretrained

Tensors = dict[str, torch.Tensor]
WRAPPERS = ("module.", "model.", "network.", "_orig_mod.")
"""What wrappers, Lightning's modules and ours among them, put before the names of all parameters."""
INSIDE = ("state_dict", "model_state_dict", "model")  # under which checkpoints have the weights
OF_TORCH = (b"PK", b"\x80")  # how its files begin: as archives, and the older ones as pickles
COUNTER = "num_batches_tracked"  # of batch norm: no weight, and not in older files
MAX_NAMES = 3
NUM_DIMENSIONS = 4  # of a convolution's weight: outputs, inputs, height, width

_fault = partial(InputError, setting="model.pretrained")


def blank_network(model: Model, image_shape: tuple[int, int, int], num_classes: int, num_targets: int) -> nn.Module:
    """The network without memory for its weights: names and shapes."""
    with torch.device("meta"):
        return build_network(model, image_shape, num_classes, num_targets)


def read_weights(path: Path) -> tuple[Tensors, str]:
    """A file's tensors by names without wrappers', and the sha256 of its bytes; InputError if it holds more or none."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _fault(f"{path}: cannot be read ({error.strerror}); give a file of weights") from error
    try:
        if path.suffix == ".safetensors":
            import safetensors.torch as safetensors  # on use: most ranks begin by the seed

            tensors: dict[str, Any] = safetensors.load(content)
        else:
            tensors = _state(content)
    except pickle.UnpicklingError:  # whose words advise to load it all the same
        fault = f"{path}: holds more than tensors and plain types; nothing of it was executed"
        raise _fault(f"{fault}; save its state dict alone (model.state_dict()), or as .safetensors") from None
    except Exception as error:  # readers raise anything on hostile bytes
        hint = "save the model's state dict, for example torch.save(model.state_dict(), FILE)"
        raise _fault(f"{path}: not a file of weights ({one_line(error)[:200]})", hint=hint) from error
    if not tensors or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise _fault(f"{path}: not a file of weights; it must hold tensors by their names, as a state dict does")
    return _without_wrapper(tensors), hashlib.sha256(content).hexdigest()


def _state(content: bytes) -> dict[str, Any]:
    if not content.startswith(OF_TORCH):
        raise ValueError("it does not begin as torch's files do")
    state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    for name in INSIDE:
        if isinstance(state, Mapping) and isinstance(state.get(name), Mapping):
            state = state[name]
    if not isinstance(state, Mapping):
        raise TypeError(f"it holds {type(state).__name__}")
    return dict(state)


def _wrapping(names: Iterable[str]) -> str:
    """Prefix that wrappers added to all names."""
    bare, before = list(names), ""
    while prefix := next((each for each in WRAPPERS if bare and all(name.startswith(each) for name in bare)), None):
        before += prefix
        bare = [name.removeprefix(prefix) for name in bare]
    return before


def _without_wrapper(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    before = _wrapping(tensors)
    return {name.removeprefix(before): tensor for name, tensor in tensors.items()}


def check_fit(tensors: Tensors, network: nn.Module, *, same_classes: bool, where: str) -> tuple[str, ...]:
    """Parameters of heads to reinitialise; InputError for weights of another network or of other channels."""
    expected, heads = _without_wrapper(network.state_dict()), heads_of(network)
    same = {name for name, tensor in expected.items() if name in tensors and tensors[name].shape == tensor.shape}
    differing = expected.keys() - same
    fresh = set(heads).intersection(map(part_of, differing)) if same_classes else set(heads)
    needed = {name: tensor for name, tensor in expected.items() if part_of(name) not in fresh}
    missing = [name for name in needed if name not in tensors and not name.endswith(COUNTER)]
    unknown = [name for name in tensors if name not in expected and part_of(name) not in fresh]
    if names := missing or unknown:
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        word = "without" if missing else "with"
        raise _other_network(where, f", {word} {', '.join(names[:MAX_NAMES])}{more}")
    for name, tensor in needed.items():
        _check_shape(name, tensors.get(name, tensor), tensor, where)
    return tuple(name for name in expected if part_of(name) in fresh)


def _other_network(where: str, difference: str) -> InputError:
    hint = "set model.name, model.width and model.depth as they were for these weights"
    return _fault(f"{where}: these weights are of another network{difference}", hint=hint)


def _check_shape(name: str, found: torch.Tensor, wanted: torch.Tensor, where: str) -> None:
    ours, theirs = list(wanted.shape), list(found.shape)
    if ours != theirs:
        if len(ours) == len(theirs) == NUM_DIMENSIONS and ours[:1] + ours[2:] == theirs[:1] + theirs[2:]:
            fault = f"{name} is for {theirs[1]} channels, and here are {ours[1]}"
            raise InputError(f"{where}: {fault}; take weights of such images, or images of as many channels")
        raise _other_network(where, f": {name} has the shape {theirs}, not {ours}")
    if found.is_floating_point() and found.device.type != "meta" and not bool(torch.isfinite(found).all()):
        raise InputError(f"{where}: {name} holds numbers that are not finite; take weights of a training that did well")


def begin_with(network: nn.Module, weights: Pretrained) -> None:
    """Load weights into a network, except those that are reinitialised; InputError if the file was changed."""
    tensors, digest = read_weights(Path(weights.path))
    if digest != weights.sha256:
        fault = f"sha256 is {digest[:12]}..., expected is {weights.sha256[:12]}..."
        raise InputError(f"{weights.path}: {fault}; the file is damaged or was changed: remove it and begin again")
    state = network.state_dict()
    before = _wrapping(state)
    with torch.no_grad():
        for name, initial in state.items():
            bare = name.removeprefix(before)
            if bare in weights.reinitialized or (bare.endswith(COUNTER) and bare not in tensors):
                continue
            if bare not in tensors:
                raise _other_network(weights.path, f", without {bare}")
            initial.copy_(tensors[bare])


def initial_state(model: Model, like: PreparedSet, weights: Pretrained, seed: int) -> bytes:
    """Initial state of a network as torch saves it: given weights (see `begin_with`), the rest by a seed."""
    torch.manual_seed(seed)
    network = build_network(model, like.picture_shape, len(like.class_names), len(like.target_names))
    begin_with(network, weights)
    content = io.BytesIO()
    torch.save(network.state_dict(), content)
    return content.getvalue()


def load_trained_model(directory: Path, digest: str) -> tuple[nn.Module, ModelFacts]:
    """Load a trained network with its weights, on the CPU in float32 and in evaluation mode, and its description.

    The digest is that of `paceline.tasks.model_bundle.digest_of`. InputError as in its `read_model`, or if the weights
    do not fit the description.
    """
    facts, weights = read_model(directory, digest)
    assert isinstance(facts, ModelFacts)
    network = build_network(facts.model, facts.image_shape, len(facts.class_names), len(facts.target_names))
    try:
        network.load_state_dict(torch.load(io.BytesIO(weights), map_location="cpu", weights_only=True))
    except pickle.UnpicklingError:  # whose words advise to load it all the same
        raise InputError(f"{directory / WEIGHTS}: holds more than tensors; nothing of it was executed") from None
    except (RuntimeError, AttributeError, TypeError, EOFError, KeyError, ValueError) as error:
        reason = one_line(error)[:200]
        raise InputError(f"{directory / WEIGHTS}: not the weights of the model next to it ({reason})") from error
    return network.eval(), facts
