"""Forward passes over a split without gradients, the same loop for validation and prediction, and folded batch norms.

Shapes: N samples, C channels, H height, W width, T regression targets.
"""

import copy
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from paceline.tasks.model.batch import Batch, take_samples
from paceline.tasks.model.objectives import Outputs, Task
from paceline.tasks.model.out_of_memory import is_out_of_memory

Int64s = np.ndarray[tuple[int], np.dtype[np.int64]]


class Prediction(NamedTuple):
    """Outputs of one batch."""

    indices_N: Int64s  # of its samples in the split
    batch: Batch
    inputs_NCHW: torch.Tensor  # what the network saw
    outputs: Outputs


@torch.no_grad()
def predictions(
    network: nn.Module, batches: Iterable[tuple[Int64s, Batch]], context: AbstractContextManager[object], task: Task
) -> Iterator[Prediction]:
    """Predict each batch, in float32, in evaluation mode, within `context` (autocast), which must be re-enterable.

    The network's mode is restored when the iteration ends. Batches come with the indices of their samples. One that
    the memory of the device does not suffice for becomes two.
    """
    was_training = network.training
    network.eval()
    dtype = next(network.parameters()).dtype
    try:
        for indices_N, batch in batches:
            waiting = [(indices_N, batch)]
            while waiting:
                part_N, part = waiting.pop()
                try:
                    with context:
                        inputs_NCHW = task.inputs(part)
                        outputs_NK, targets_NT = network(inputs_NCHW.to(dtype))
                    outputs = outputs_NK.float(), None if targets_NT is None else targets_NT.float()
                except RuntimeError as error:
                    if len(part_N) == 1 or not is_out_of_memory(error):
                        raise
                    half = len(part_N) // 2
                    second = part_N[half:], take_samples(part, half, len(part_N))
                    waiting += [second, (part_N[:half], take_samples(part, 0, half))]
                    continue
                yield Prediction(part_N, part, inputs_NCHW, outputs)
    finally:
        network.train(was_training)


def fold_batch_norm(network: nn.Module) -> nn.Module:
    """A copy for evaluation in which each convolution takes over the batch norm that follows it directly.

    In evaluation batch norm is y = (x - mean) / sqrt(var + eps) * weight + bias with fixed numbers, which the
    convolution's weights and bias can take over (Jacob et al., "Quantization and Training of Neural Networks for
    Efficient Integer-Arithmetic-Only Inference", 2018, section 3.2). Only rounding differs. The copy cannot be trained.

    The pairs are found in `nn.Sequential` parts, and in the attribute `norm_pairs` of other parts.
    """
    folded = copy.deepcopy(network).eval()
    for part in folded.modules():
        pairs = list(getattr(part, "norm_pairs", ()))
        # Not its `named_children`, which has a layer that is used twice once.
        layers = list(part._modules.items()) if isinstance(part, nn.Sequential) else []
        for index, (name, layer) in enumerate(layers):
            norm_name = _norm_behind(layers[index + 1 : index + 3])
            if isinstance(layer, nn.Conv2d) and norm_name is not None:
                pairs.append((name, norm_name))
        for name, norm_name in pairs:
            part.add_module(name, fuse_conv_bn_eval(getattr(part, name), getattr(part, norm_name)))
            part.add_module(norm_name, nn.Identity())
    return folded


def _norm_behind(layers: list[tuple[str, nn.Module]]) -> str | None:
    """The name of a batch norm that can be folded: the first of two layers, or the second one after a max-pool.

    A max-pool may stay where it is while no weight of the norm is negative: growing functions and the choice of the
    largest commute.
    """
    for position, (name, layer) in enumerate(layers):
        if isinstance(layer, nn.BatchNorm2d):
            weight: torch.Tensor | None = layer.weight  # None without weights of its own, which its type does not say
            is_fixed = layer.running_mean is not None and layer.running_var is not None
            commutes = position == 0 or weight is None or bool((weight >= 0).all())
            return name if is_fixed and commutes else None
        if not isinstance(layer, nn.MaxPool2d):
            break
    return None
