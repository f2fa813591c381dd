"""Parts of a network: the head, which predicts, the backbone, which computes features, and the output of each layer.

What was learned of other data is of use in the backbone, which may then stay as it is or be trained more slowly.
Shapes: N samples, C channels, H height, W width, D values of a layer.
"""

import threading
from typing import Any

import torch
from torch import nn

from paceline.conf.config import Config
from paceline.conf.recipe import Recipe
from paceline.tasks.errors import InputError
from paceline.tasks.model.muon import RATE_FACTOR
from paceline.tasks.model.networks.registry import OwnNetwork, ViewMean

HEADS = ("classify", "regress", "fc", "head", "classifier")
"""Names of the parts that are heads, in networks which do not name their own in `heads`, a tuple."""


def core_of(network: nn.Module) -> nn.Module:
    """The network without what takes the mean over views, and without what makes a pair of a user's answer."""
    while isinstance(network, ViewMean | OwnNetwork):
        network = network.network
    return network


def heads_of(network: nn.Module) -> tuple[str, ...]:
    """Names of its parts that are heads; none for a network that has no such part."""
    core = core_of(network)
    named = getattr(core, "heads", None)
    heads = named if isinstance(named, tuple) else HEADS
    return tuple(name for name, _ in core.named_children() if name in heads)


def reach_and_stride(network: nn.Module) -> tuple[int, int] | None:
    """Receptive field (`reach`) and the factor of height and width (`stride`), in pixels; None without them."""
    core = core_of(network)
    reach, stride = getattr(core, "reach", None), getattr(core, "stride", 1)
    return (reach, stride) if isinstance(reach, int) and isinstance(stride, int) else None


def part_of(name: str) -> str:
    """The part that a parameter belongs to, by its name in the network's core."""
    return name.partition(".")[0]


def freeze(network: nn.Module, what: str) -> None:
    """Keep a part as it is: no gradients, and as in evaluation, so that batch norms keep their statistics.

    Calling `train()` of the whole network undoes the latter; Lightning keeps the modes that it finds. `what` is
    `backbone`, all but the heads; or the name of a part of the core, which is frozen with all that is registered before
    it. KeyError if that part does not exist; ValueError if it contains a head, or follows one.
    """
    parts, heads = dict(core_of(network).named_modules()), heads_of(network)
    if what == "backbone":
        frozen = [name for name in parts if part_of(name) not in heads]
    else:
        last = max((index for index, name in enumerate(parts) if f"{name}.".startswith(f"{what}.")), default=None)
        if last is None:
            raise KeyError(what)
        frozen = list(parts)[: last + 1]
        if not set(heads).isdisjoint(map(part_of, frozen)):
            raise ValueError(what)
    trained = set(parts).difference(frozen)
    for name in frozen:
        for parameter in parts[name].parameters(recurse=False):
            parameter.requires_grad_(False)
        if name and not any(other.startswith(f"{name}.") for other in trained):
            parts[name].training = False


def check_parts(config: Config, network: nn.Module) -> None:
    """Check `model.freeze` and `recipe.backbone_rate`; freezes. InputError without such a part or anything to train."""
    name, layer, heads, core = config.model.name, config.model.freeze, heads_of(network), core_of(network)
    slower = f"recipe.backbone_rate={config.recipe.backbone_rate:g}" if config.recipe.backbone_rate != 1 else None
    if not heads and (layer == "backbone" or slower):
        setting = "model.freeze=backbone" if layer == "backbone" else slower
        raise InputError(f"{setting} needs a network with a head, and model.name={name} has none; remove it")
    if layer in ("none", "backbone"):
        return
    try:
        freeze(network, layer)
    except KeyError:
        weights = [weight.split(".") for weight, _ in core.named_parameters()]
        parts = {".".join(names[:length]) for names in weights for length in (1, 2)}
        names = [part for part, _ in core.named_modules() if part in parts and part not in heads]
        raise InputError(f"model.freeze={layer}: {name} has no such layer; it has {', '.join(names)}") from None
    except ValueError:
        fix = f"name a layer before {heads[0]}, or use backbone"
        raise InputError(f"model.freeze={layer}: the head would stay as well, which is to be trained; {fix}") from None
    if any(layer.startswith(f"{part}.") for part in getattr(core, "unordered", ())):
        fault = "these layers do not run in the order of their names"
        raise InputError(f"model.freeze={layer}: {fault}; name another part")
    trained = {part_of(weight) for weight, of in core.named_parameters() if of.requires_grad}
    if slower and trained <= set(heads):
        fault = f"{slower} has no use with model.freeze={layer}, which leaves the head alone to be trained"
        raise InputError(f"{fault}; drop one of them")
    if not any(weight.requires_grad for weight in network.parameters()):
        raise InputError(f"model.freeze={layer}: nothing of {name} would be trained; name a layer before it")


def parameter_groups(network: nn.Module, recipe: Recipe, learning_rate: float) -> list[dict[str, Any]]:
    """The trained parameters, in groups of one learning rate each; the first one's is the recipe's own."""
    core, heads = core_of(network), heads_of(network)
    trained = [(part_of(name), weight) for name, weight in core.named_parameters() if weight.requires_grad]
    if recipe.backbone_rate == 1:
        return [{"params": [weight for _, weight in trained]}]
    groups: list[dict[str, Any]] = [
        {"params": [weight for part, weight in trained if (part in heads) == is_head], RATE_FACTOR: factor}
        for is_head, factor in ((True, 1.0), (False, recipe.backbone_rate))
    ]
    return [group | {"lr": learning_rate * group[RATE_FACTOR]} for group in groups if group["params"]]


def layer_sizes(network: nn.Module, image_shape: tuple[int, int, int]) -> dict[str, int]:
    """Number of values of each layer for an image of `image_shape` (height, width, channels), by name.

    Layers that give no tensor with a row for each image are left out, such as lists of layers.
    """
    core, sizes = core_of(network).eval(), dict[nn.Module, int]()  # evaluation changes no statistics
    height, width, channels = image_shape
    images_NCHW = torch.zeros(2, channels, height, width)

    def take(layer: nn.Module, inputs: object, output: object) -> None:
        sizes.pop(layer, None)  # of a layer that is used more than once the last time
        if isinstance(output, torch.Tensor) and output.shape[:1] == images_NCHW.shape[:1]:
            sizes[layer] = output[0].numel()

    layers = {name: layer for name, layer in core.named_modules() if name}
    hooks = [layer.register_forward_hook(take) for layer in layers.values()]
    with torch.no_grad():
        core(images_NCHW)
    for hook in hooks:
        hook.remove()
    return {name: sizes[layer] for name, layer in layers.items() if layer in sizes}


class Activations(nn.Module):
    """Images to the output of a layer (a name of `layer_sizes`), flattened (N, D), float32.

    A mean over views is left out; of a layer that is used more than once the last output counts. Batch norm must not be
    folded, or a convolution would give the output of its norm.
    """

    def __init__(self, network: nn.Module, layer: str) -> None:
        super().__init__()
        self.core = core_of(network)
        self._found: dict[int, torch.Tensor] = {}  # by thread: those of a worker share its model
        self.core.get_submodule(layer).register_forward_hook(self._take)

    def _take(self, layer: nn.Module, inputs: object, output: torch.Tensor) -> None:
        self._found[threading.get_ident()] = output.clone()  # the next layer may work in place

    def forward(self, images_NCHW: torch.Tensor) -> tuple[torch.Tensor]:
        """Return `(values_ND,)`."""
        self.core(images_NCHW)
        return (self._found.pop(threading.get_ident()).flatten(1).float(),)
