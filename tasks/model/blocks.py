"""Blocks of convolutions that several networks begin with."""

from __future__ import annotations

from torch import nn


def conv_blocks(channels: int, width: int, depth: int) -> tuple[nn.Sequential, int]:
    """Three blocks of `depth` 3x3 convolutions with batch norm and ReLU, a max-pool between them; their channels too.

    Each block has twice the filters of the one before, the first has `width`.
    """
    layers: list[nn.Module] = []
    for index, filters in enumerate((width, 2 * width, 4 * width)):
        if index:
            layers.append(nn.MaxPool2d(2))
        for _ in range(depth):
            layers += [nn.Conv2d(channels, filters, 3, padding=1, bias=False), nn.BatchNorm2d(filters), nn.ReLU()]
            channels = filters
    return nn.Sequential(*layers), channels
