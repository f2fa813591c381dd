"""Batch norm folded into the convolutions before it: in evaluation the same function of the images, in fewer passes."""

from __future__ import annotations

import copy

from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval


def fold_batch_norm(network: nn.Module) -> nn.Module:
    """A copy for evaluation in which each convolution does its batch norm's work, wherever the two are neighbours.

    In evaluation batch norm is y = (x - mean) / sqrt(var + eps) * weight + bias with fixed numbers, which the
    convolution's weights and bias can take over (Jacob et al., "Quantization and Training of Neural Networks for
    Efficient Integer-Arithmetic-Only Inference", 2018, section 3.2). Only rounding differs. Not to be trained.

    A max-pool between them may stay where it is while no weight of the norm is negative: growing functions and the
    choice of the largest commute.

    Args:
        network: whose `nn.Sequential` parts are looked through, and those that name the convolutions and the norms
            behind them as pairs in `norm_pairs`; is not changed.
    """
    folded = copy.deepcopy(network).eval()
    for part in folded.modules():
        if isinstance(part, nn.Sequential):
            _fold(part)
        for name, norm_name in getattr(part, "norm_pairs", ()):
            part.add_module(name, fuse_conv_bn_eval(getattr(part, name), getattr(part, norm_name)))
            part.add_module(norm_name, nn.Identity())
    return folded


def _fold(part: nn.Sequential) -> None:
    layers = list(part.named_children())
    for index, (name, convolution) in enumerate(layers):
        norm_name, norm = _norm_behind(layers[index + 1 : index + 3])
        if isinstance(convolution, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
            part.add_module(name, fuse_conv_bn_eval(convolution, norm))
            part.add_module(norm_name, nn.Identity())


def _norm_behind(layers: list[tuple[str, nn.Module]]) -> tuple[str, nn.BatchNorm2d | None]:
    """The batch norm that comes first of two layers, or second after a max-pool, with its name."""
    for position, (name, layer) in enumerate(layers):
        if isinstance(layer, nn.BatchNorm2d):
            return name, layer if position == 0 or bool((layer.weight >= 0).all()) else None
        if not isinstance(layer, nn.MaxPool2d):
            break
    return "", None
