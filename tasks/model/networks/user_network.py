"""Models of the user's, and how they become networks like those of Paceline; infra/docs/guides/extend.md defines them.

A model imports nothing of Paceline. Shapes: N samples, C channels, H height, W width, K classes, T regression targets.
"""

import torch
from torch import nn

from paceline.conf.model import Model
from paceline.conf.plugins import model_facts
from paceline.tasks.errors import RunError
from paceline.tasks.model.flops import GIVEN
from paceline.tasks.model.networks.convolutional import Outputs
from paceline.tasks.plugins import attribute_errors_to, load_plugin


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
    """Build a user's model and try it on images; InputError if it is not installed, RunError if it does not fit."""
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
        fault = f"{plugin} maps images (2, {channels}, {height}, {width}) to {' and '.join(map(str, given))}"
        raise RunError(f"{fault}; its task needs {' and '.join(map(str, expected))}")
    if not any(weight.requires_grad for weight in network.parameters()):
        raise RunError(f"{plugin} has no weights to be learned; give it some")
    return network
