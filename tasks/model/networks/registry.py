"""The table of networks, those of users, and test-time augmentation as a part, so that evaluation and exports have it.

Networks that classify map images_NCHW to `(logits_NK, targets_NT)`; the second is None without regression targets.
A user's model imports nothing of Paceline: infra/docs/guides/extend.md defines it.
Shapes: N samples, C channels, H height, W width, V views, K classes, T regression targets.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from paceline.conf.model import Model
from paceline.conf.plugins import model_facts
from paceline.tasks.errors import RunError
from paceline.tasks.model.flops import GIVEN
from paceline.tasks.model.networks.convolutional import ConvBlocks, DnCnn, Outputs, SequenceNet, TwoHead, UNet
from paceline.tasks.model.networks.resnet import ResNet, basic, bottleneck
from paceline.tasks.model.networks.whitened import Whitened
from paceline.tasks.plugins import attribute_errors_to, load_plugin

_NUM_MIRRORED = 2  # the image and its mirror image


def build_network(model: Model, image_shape: tuple[int, int, int], num_classes: int, num_targets: int) -> nn.Module:
    """Build the network for images of `image_shape` (height, width, channels); errors as in `build_user_network`."""
    network = BUILDERS.get(model.name, build_user_network)(model, image_shape, num_classes, num_targets)
    return network if model.test_views == 1 else ViewMean(network, model.test_views)


class ViewMean(nn.Module):
    """In training the network itself; in evaluation the mean of its logits over views of each image.

    The shifted views count as much, all together, as those that are not. The network has no regression targets, which a
    mirror image may change.

    Source: Krizhevsky et al., "ImageNet Classification with Deep Convolutional Neural Networks" (2012), section 4.1;
    these views and their weights: Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU" (2024).
    """

    def __init__(self, network: nn.Module, num_views: int) -> None:
        super().__init__()
        self.network = network
        self.num_views = num_views

    def forward(self, images_NCHW: torch.Tensor) -> Outputs:
        """Return `(logits_NK, None)`."""
        if self.training:
            outputs: Outputs = self.network(images_NCHW)
            return outputs
        # One pass over all views: one launch of each kernel, and one copy of the network where it is exported.
        height, width = images_NCHW.shape[2:]
        views = [images_NCHW]  # those that are not shifted first, each followed by its mirror image
        if self.num_views > _NUM_MIRRORED:
            padded = functional.pad(images_NCHW, (1, 1, 1, 1), mode="reflect")
            views += [padded[:, :, :height, :width], padded[:, :, 2:, 2:]]
        logits, _ = self.network(torch.cat([view for image in views for view in (image, image.flip(3))]))
        exact = torch.promote_types(logits.dtype, torch.float32)
        logits_VNK = logits.to(exact).unflatten(0, (self.num_views, -1))
        parts = logits_VNK.split((_NUM_MIRRORED, self.num_views - _NUM_MIRRORED))
        return torch.stack([part.mean(0) for part in parts if len(part)]).mean(0), None


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


def build_user_network(
    model: Model, image_shape: tuple[int, int, int], num_classes: int, num_targets: int
) -> nn.Module:
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


BUILDERS: dict[str, Callable[[Model, tuple[int, int, int], int, int], nn.Module]] = {  # all others are the user's
    "convblocks": lambda model, shape, classes, _: ConvBlocks(shape[2], classes, model.width, model.depth),
    "twohead": lambda model, shape, classes, targets: TwoHead(shape, classes, targets, model.width),
    "whitened": lambda model, shape, classes, _: Whitened(shape, classes, model.width),
    "unet": lambda model, shape, classes, _: UNet(shape[2], classes, model.width, model.depth),
    "dncnn": lambda model, shape, classes, _: DnCnn(shape[2], model.width, model.depth),
    "resnet18": lambda model, shape, classes, _: ResNet(shape[2], classes, basic, (2, 2, 2, 2)),
    "resnet50": lambda model, shape, classes, _: ResNet(shape[2], classes, bottleneck, (3, 4, 6, 3)),
    "sequence": lambda model, shape, classes, _: SequenceNet(shape, classes, model),
}
