"""Blocks of several networks: convolutions, subsampling, features in their memory format."""

import torch
from torch import fx, nn
from torch.nn import functional


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


def every_nth(features_NCHW: torch.Tensor, stride: int) -> torch.Tensor:
    """Every `stride`-th row and column, for a 1x1 convolution of stride 1 after it.

    A strided 1x1 convolution is the same, but oneDNN's weight gradient of it writes past its buffers with two threads
    and few channels (SIGSEGV, heap corruption; torch 2.13 on Zen 5, 2026-11-21). They are taken as means of one pixel
    each and not as a slice, for the gradient of a slice is never channels last (see `keep_format`).
    """
    return features_NCHW if stride == 1 else functional.avg_pool2d(features_NCHW, 1, stride)


def keep_format(features_NCHW: torch.Tensor) -> torch.Tensor:
    """Return the features, whose gradient will be channels last where they are.

    Flattening or averaging gives a contiguous gradient, and all the operations before it would go through memory in two
    orders at once: a ReLU then takes up to nine times as long (infra/LOG.md, 2026-11-23). A compiled network orders its
    memory itself.
    """
    if isinstance(
        features_NCHW, fx.Proxy
    ):  # traced for a process without Paceline: the gradient of a mean of one pixel
        return functional.avg_pool2d(features_NCHW, 1)
    if features_NCHW.requires_grad and not torch.compiler.is_compiling() and not features_NCHW.is_contiguous():
        features_NCHW.register_hook(lambda gradient_NCHW: gradient_NCHW.contiguous(memory_format=torch.channels_last))
    return features_NCHW
