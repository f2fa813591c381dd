"""Models of the user's: what one must offer, and how it becomes a network like those of Paceline.

A model imports nothing of Paceline. Shapes: N samples, C channels, H height, W width, K classes, T regression targets.
"""

from typing import Protocol

import torch
from torch import nn

from paceline.conf.model import Model
from paceline.conf.plugins import model_facts
from paceline.tasks.errors import RunError
from paceline.tasks.model.flops import GIVEN
from paceline.tasks.model.networks.convolutional import Outputs
from paceline.tasks.plugins import attribute_errors_to, load_plugin


class Builder(Protocol):
    """What the entry point of a model leads to: a subclass of `nn.Module`, or a function that gives a module.

    Two attributes of the class or function are read, where it has them: `task` ("classify", "segment" or "denoise"; the
    first by default) and `takes_targets` (False); see `paceline.conf.plugins.NetworkFacts`. Two attributes of the
    module of a model of pixels are read for `paceline predict` with `--own-size`: `reach`, its receptive field, and
    `stride`, the factor of height and width (1), both in pixels.

    The module maps normalised images_NCHW to logits_NK, to logits_NKHW of each pixel's class, or to images_NCHW without
    noise. If it takes targets, it returns a pair: that, and targets_NT. It must follow from the arguments alone,
    because it is built again for every training and prediction, and then gets the stored weights. Random numbers in
    training, such as those of dropout, follow from seed, rank and step if they come from torch's own generators.

    The module's attribute `flops_per_sample`, where it has one, gives the floating-point operations of a sample:
    forward, and forward with backward. Otherwise torch counts them.
    """

    def __call__(self, *, image_shape: tuple[int, int, int], num_classes: int, width: int, depth: int) -> nn.Module:
        """Build the network."""


class OwnNetwork(nn.Module):
    """A module of the user's that gives a pair, as all networks here do."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.network = module
        if hasattr(module, GIVEN):
            forward, training = getattr(module, GIVEN)
            setattr(self, GIVEN, (float(forward), float(training)))

    def forward(self, images_NCHW: torch.Tensor) -> Outputs:
        """Return the outputs of the task, and targets or None."""
        outputs = self.network(images_NCHW)
        return outputs if isinstance(outputs, tuple) else (outputs, None)


def build(model: Model, image_shape: tuple[int, int, int], num_classes: int, num_targets: int) -> nn.Module:
    """Build a model of the user's, and try it on two black images.

    InputError if its package is not installed here; RunError if it cannot be built, or does not give what its task has.
    """
    plugin, builder = load_plugin("model", model.name)
    with attribute_errors_to(plugin, "building it", RunError, RunError):
        module = builder(image_shape=image_shape, num_classes=num_classes, width=model.width, depth=model.depth)
    if not isinstance(module, nn.Module):
        raise RunError(f"{plugin} builds {type(module).__name__}; give a torch.nn.Module")
    with attribute_errors_to(plugin, f"reading {GIVEN}", RunError, RunError):
        network = OwnNetwork(module)
    height, width, channels = image_shape
    network.eval()  # which changes no statistics
    with attribute_errors_to(plugin, "two images", RunError, RunError), torch.no_grad():
        outputs = network(torch.zeros(2, channels, height, width))
    network.train()
    shapes: dict[str, tuple[int, ...]] = {"segment": (num_classes, height, width), "denoise": (channels, height, width)}
    expected = [(2, *shapes.get(model_facts(plugin.name).task, (num_classes,)))]
    expected += [(2, num_targets)] if num_targets else []
    given = [tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__ for output in outputs]
    if given != (expected if num_targets else [*expected, "NoneType"]):
        raise RunError(
            f"{plugin} maps images (2, {channels}, {height}, {width}) to {' and '.join(map(str, given))}; "
            f"its task needs {' and '.join(map(str, expected))}"
        )
    if not any(weight.requires_grad for weight in network.parameters()):
        raise RunError(f"{plugin} has no weights to be learned; give it some")
    return network
