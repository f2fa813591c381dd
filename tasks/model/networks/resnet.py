"""ResNet-18 and ResNet-50. Names and shapes of the parameters are torchvision's, so that published weights load.

Shapes: N samples, C channels, H height, W width, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

from paceline.tasks.model.networks.convolutional import Outputs, every_nth, keep_format

WIDTHS = (64, 128, 256, 512)  # filters of the four layers; bottlenecks give four times as many
EXPANSION = 4


class ResNet(nn.Module):
    """A stem that halves images twice, four layers of residual blocks, the mean over what is left, one dense layer.

    The stem is the published one, so that its weights fit, also for small images: of 32 pixels a side 8 are left behind
    it, and 1 at the end. Pictures that small gain by a larger `data.image_size`.

    Source: He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition" (2016); bottlenecks halve in their
    3x3 convolution, as torchvision has them ("ResNet v1.5"). Initial weights: He et al., "Delving Deep into Rectifiers"
    (2015).
    """

    norm_pairs = (("conv1", "bn1"),)
    heads = ("fc",)

    def __init__(
        self, channels: int, num_classes: int, block: Callable[[int, int, int], Block], depths: Sequence[int]
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, WIDTHS[0], 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(WIDTHS[0])
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        num_features = WIDTHS[0]
        layers: list[nn.Sequential] = []
        for filters, depth in zip(WIDTHS, depths, strict=True):
            blocks = []
            for index in range(depth):
                blocks.append(block(num_features, filters, 2 if layers and index == 0 else 1))
                num_features = blocks[-1].num_outputs
            layers.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = layers
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(num_features, num_classes)
        for part in self.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images_NCHW: torch.Tensor) -> Outputs:
        """Return `(logits_NK, None)`."""
        features = self.maxpool(self.relu(self.bn1(self.conv1(images_NCHW))))
        features = self.layer4(self.layer3(self.layer2(self.layer1(features))))
        return self.fc(self.avgpool(keep_format(features)).flatten(1)), None


class Shortcut(nn.Sequential):
    """A 1x1 convolution and batch norm, on every pixel or on every second one."""

    def __init__(self, channels: int, filters: int, stride: int) -> None:
        super().__init__(nn.Conv2d(channels, filters, 1, bias=False), nn.BatchNorm2d(filters))
        self.stride = stride

    def forward(self, features_NCHW: torch.Tensor) -> torch.Tensor:
        """Shortcut over every `stride`-th row and column of its input."""
        convolution, norm = self
        projected: torch.Tensor = norm(convolution(every_nth(features_NCHW, self.stride)))
        return projected


class Block(nn.Module):
    """Convolutions with batch norms (`filters`, size and stride of each), and a shortcut."""

    def __init__(self, channels: int, layers: Sequence[tuple[int, int, int]], relu_after: int) -> None:
        super().__init__()
        numbers = range(1, len(layers) + 1)
        self.norm_pairs = tuple((f"conv{number}", f"bn{number}") for number in numbers)
        num_inputs, stride = channels, math.prod(step for _, _, step in layers)
        for number, (filters, size, step) in zip(numbers, layers, strict=True):
            convolution = nn.Conv2d(num_inputs, filters, size, stride=step, padding=size // 2, bias=False)
            self.add_module(f"conv{number}", convolution)
            self.add_module(f"bn{number}", nn.BatchNorm2d(filters))
            if number == relu_after:  # its place among the names is torchvision's, too
                self.relu = nn.ReLU()
            num_inputs = filters
        self.num_outputs = num_inputs
        self.downsample = None if stride == 1 and channels == num_inputs else Shortcut(channels, num_inputs, stride)

    def forward(self, features_NCHW: torch.Tensor) -> torch.Tensor:
        """Features of the block."""
        inside = features_NCHW
        for index, (convolution, norm) in enumerate(self.norm_pairs):
            inside = getattr(self, norm)(getattr(self, convolution)(self.relu(inside) if index else inside))
        shortcut = features_NCHW if self.downsample is None else self.downsample(features_NCHW)
        output: torch.Tensor = self.relu(inside + shortcut)
        return output


def basic(channels: int, filters: int, stride: int) -> Block:
    """The block of the small ones: two 3x3 convolutions."""
    return Block(channels, [(filters, 3, stride), (filters, 3, 1)], relu_after=1)


def bottleneck(channels: int, filters: int, stride: int) -> Block:
    """The block of the large ones: a 1x1, a 3x3 and a 1x1 convolution."""
    return Block(channels, [(filters, 1, 1), (filters, 3, stride), (EXPANSION * filters, 1, 1)], relu_after=3)
