"""The table of networks, and two of them.

Networks that classify map images_NCHW to `(logits_NK, targets_NT)`; the second is None without regression targets.
Shapes: N samples, C channels, H height, W width, K classes, T regression targets.
"""

from collections.abc import Callable

import torch
from torch import nn

from paceline.conf.model import Model
from paceline.tasks.model.networks import user_network as own
from paceline.tasks.model.networks.blocks import conv_blocks, every_nth, keep_format
from paceline.tasks.model.networks.pixel_networks import DnCnn, UNet
from paceline.tasks.model.networks.resnet import resnet18, resnet50
from paceline.tasks.model.networks.sequence import SequenceNet
from paceline.tasks.model.networks.test_time_augmentation import ViewMean
from paceline.tasks.model.networks.whitened import Whitened

Outputs = tuple[torch.Tensor, torch.Tensor | None]


def build_network(model: Model, image_shape: tuple[int, int, int], num_classes: int, num_targets: int) -> nn.Module:
    """Build the network for images of `image_shape` (height, width, channels); errors as in `user_network.build`."""
    network = BUILDERS.get(model.name, own.build)(model, image_shape, num_classes, num_targets)
    return network if model.test_views == 1 else ViewMean(network, model.test_views)


class ConvBlocks(nn.Module):
    """Three blocks of `depth` 3x3 convolutions with batch norm and ReLU, average pool, one dense layer.

    Source: the network of MathWorks' "Train Network Using Automatic Multi-GPU Support" (width 32, depth 4).
    """

    def __init__(self, channels: int, num_classes: int, width: int, depth: int) -> None:
        super().__init__()
        self.features, channels = conv_blocks(channels, width, depth)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classify = nn.Linear(channels, num_classes)

    def forward(self, images_NCHW: torch.Tensor) -> Outputs:
        """Return `(logits_NK, None)`."""
        return self.classify(self.pool(keep_format(self.features(images_NCHW))).flatten(1)), None


class TwoHead(nn.Module):
    """A small residual network with a class head and a regression head.

    Source: the model of MathWorks' "Evaluate Performance of Accelerated Deep Learning Function" (width 16).
    """

    def __init__(self, image_shape: tuple[int, int, int], num_classes: int, num_targets: int, filters: int) -> None:
        super().__init__()
        height, width, channels = image_shape
        wide = 2 * filters
        self.stem = nn.Sequential(
            nn.Conv2d(channels, filters, 5, padding=2, bias=False), nn.BatchNorm2d(filters), nn.ReLU()
        )
        self.branch = nn.Sequential(
            nn.Conv2d(filters, wide, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU(),
            nn.Conv2d(wide, wide, 3, padding=1, bias=False),
            nn.BatchNorm2d(wide),
        )
        self.skip = nn.Sequential(nn.Conv2d(filters, wide, 1, bias=False), nn.BatchNorm2d(wide))
        num_features = wide * ((height + 1) // 2) * ((width + 1) // 2)
        self.classify = nn.Linear(num_features, num_classes)
        self.regress = nn.Linear(num_features, num_targets)

    def forward(self, images_NCHW: torch.Tensor) -> Outputs:
        """Return `(logits_NK, targets_NT)`."""
        stem = self.stem(images_NCHW)
        features = keep_format(torch.relu(self.branch(stem) + self.skip(every_nth(stem, 2)))).flatten(1)
        return self.classify(features), self.regress(features)


BUILDERS: dict[str, Callable[[Model, tuple[int, int, int], int, int], nn.Module]] = {
    "convblocks": lambda model, shape, classes, _: ConvBlocks(shape[2], classes, model.width, model.depth),
    "twohead": lambda model, shape, classes, targets: TwoHead(shape, classes, targets, model.width),
    "whitened": lambda model, shape, classes, _: Whitened(shape, classes, model.width),
    "unet": lambda model, shape, classes, _: UNet(shape[2], classes, model.width, model.depth),
    "dncnn": lambda model, shape, classes, _: DnCnn(shape[2], model.width, model.depth),
    "resnet18": lambda model, shape, classes, _: resnet18(shape[2], classes),
    "resnet50": lambda model, shape, classes, _: resnet50(shape[2], classes),
    "sequence": lambda model, shape, classes, _: SequenceNet(shape, classes, model),
}
"""By name; all others are the user's."""
