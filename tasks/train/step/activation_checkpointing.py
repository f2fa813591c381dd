"""Activation checkpointing: parts of a network whose activations the backward pass computes again.

Only the inputs of a segment stay in memory between the two passes: about the square root of all activations where
segments are as many as the layers in each (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016).
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from paceline.tasks.errors import InputError


class CheckpointedSequential(nn.Sequential):
    """A sequence of layers in segments; each is computed again when its gradients are due."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Apply the layers, with the results of `nn.Sequential`."""
        layers = list(self)
        if not torch.is_grad_enabled():
            return _apply(layers, features)
        # A part of several layers, such as a residual block, is a segment of its own.
        has_parts = any(next(layer.children(), None) is not None for layer in layers)
        length = 1 if has_parts else math.isqrt(len(layers)) or 1
        for start in range(0, len(layers), length):
            features = _checkpoint(layers[start : start + length], features)
        return features


def _apply(layers: list[nn.Module], features: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        features = layer(features)
    return features


def _checkpoint(layers: list[nn.Module], features: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = checkpoint(
        _apply, layers, features, use_reentrant=False, context_fn=lambda: (nullcontext(), _without_statistics(layers))
    )
    return output


@contextmanager
def _without_statistics(layers: list[nn.Module]) -> Iterator[None]:
    """Let batch norms compute as in training without counting the batch into their running statistics again."""
    parts = (part for layer in layers for part in layer.modules())
    norms = [part for part in parts if isinstance(part, _BatchNorm) and part.training and part.track_running_stats]
    states = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, states, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count


def checkpoint_activations(network: nn.Module) -> None:
    """Checkpoint the activations of a network's outermost sequences, in place; names and values of weights stay.

    Raises InputError: the network has no `nn.Sequential`.
    """
    names: list[str] = []
    for name, part in network.named_modules():
        if type(part) is nn.Sequential and not any(name.startswith(f"{outer}.") or not outer for outer in names):
            part.__class__ = CheckpointedSequential
            names.append(name)
    if not names:
        fault = "execution.activation_checkpointing=on needs a network with parts of the type torch.nn.Sequential"
        raise InputError(f"{fault}, and this one has none; use execution.activation_checkpointing=off")
