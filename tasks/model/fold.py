"""Batch norm folded into the convolutions before it: in evaluation the same function of the images, in fewer passes."""

from __future__ import annotations

import copy
from itertools import pairwise

from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval


def fold_batch_norm(network: nn.Module) -> nn.Module:
    """A copy for evaluation in which each convolution does its batch norm's work, wherever the two are neighbours.

    In evaluation batch norm is y = (x - mean) / sqrt(var + eps) * weight + bias with fixed numbers, which the
    convolution's weights and bias can take over (Jacob et al., "Quantization and Training of Neural Networks for
    Efficient Integer-Arithmetic-Only Inference", 2018, section 3.2). Only rounding differs. Not to be trained.

    Args:
        network: whose `nn.Sequential` parts are looked through; is not changed.
    """
    folded = copy.deepcopy(network).eval()
    for part in folded.modules():
        if isinstance(part, nn.Sequential):
            for (at, convolution), (after, norm) in list(pairwise(part.named_children())):
                if isinstance(convolution, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                    part.add_module(at, fuse_conv_bn_eval(convolution, norm))
                    part.add_module(after, nn.Identity())
    return folded
