"""Batch norm folded into the convolutions before it: in evaluation the same function of the images, in fewer passes."""

from __future__ import annotations

import copy

import torch
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
    # Not its `named_children`, which has a layer that is used twice once.
    layers = list(part._modules.items())
    for index, (name, convolution) in enumerate(layers):
        norm_name, norm = _norm_behind(layers[index + 1 : index + 3])
        if isinstance(convolution, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
            part.add_module(name, fuse_conv_bn_eval(convolution, norm))
            part.add_module(norm_name, nn.Identity())


def _norm_behind(layers: list[tuple[str, nn.Module]]) -> tuple[str, nn.BatchNorm2d | None]:
    """The batch norm that comes first of two layers, or second after a max-pool, with its name."""
    for position, (name, layer) in enumerate(layers):
        if isinstance(layer, nn.BatchNorm2d):
            return name, layer if _folds(layer, behind_pool=position > 0) else None
        if not isinstance(layer, nn.MaxPool2d):
            break
    return "", None


def _folds(norm: nn.BatchNorm2d, *, behind_pool: bool) -> bool:
    """Whether its numbers are fixed in evaluation, and let a max-pool stay before it."""
    if norm.running_mean is None or norm.running_var is None:
        return False
    weight: torch.Tensor | None = norm.weight  # None without weights of its own, which its type does not say
    return not behind_pool or weight is None or bool((weight >= 0).all())
