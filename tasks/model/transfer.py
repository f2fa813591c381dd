"""The two parts of a network: the head, which tells something, and the backbone, which it tells it from.

What was learned of other data is of use in the backbone, which may then stay as it is or be trained more slowly.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from conf.schema import Recipe
from tasks.model.muon import RATE_FACTOR
from tasks.model.own import OwnNetwork
from tasks.model.views import ViewMean

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


def part_of(name: str) -> str:
    """The part that a parameter belongs to, by its name in the network's core."""
    return name.partition(".")[0]


def freeze_backbone(network: nn.Module) -> None:
    """Keep all but the heads as it is: no gradients, and as in evaluation, so that batch norms keep their statistics.

    Copies of the network are frozen as well. Whoever calls `train()` of the whole network undoes the latter; nobody
    does in a training (Lightning keeps the modes that it finds).
    """
    core, heads = core_of(network), heads_of(network)
    for parameter in core.parameters(recurse=False):
        parameter.requires_grad_(False)
    for name, part in core.named_children():
        if name not in heads:
            part.requires_grad_(False)
            part.eval()


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
    return [group | {"lr": learning_rate * factor_of(group)} for group in groups if group["params"]]


def factor_of(group: dict[str, Any]) -> float:
    """What the learning rate of a group is multiplied by."""
    return float(group.get(RATE_FACTOR, 1.0))
