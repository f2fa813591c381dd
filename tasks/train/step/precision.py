"""Precision and memory format of a network, the same in trainings and probes."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from paceline.conf.execution import Precision

NUM_IMAGE_DIMENSIONS = 4  # only such weights have a memory format
AUTOCAST_DTYPES: dict[Precision, torch.dtype] = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def prepare_network(network: nn.Module, precision: Precision, channels_last: bool, device: torch.device) -> nn.Module:
    """Move the network to its device, type and memory format."""
    network = network.to(device=device, dtype=torch.float64 if precision == "64-true" else torch.float32)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    for parameter in network.parameters():
        if parameter.dim() == NUM_IMAGE_DIMENSIONS:
            parameter.data = parameter.data.contiguous(memory_format=layout)
    return network


def forward_context(
    precision: Precision, device: torch.device, *, is_captured: bool = False
) -> AbstractContextManager[object]:
    """The autocast region of a forward pass, or nothing for the true precisions.

    A CUDA graph must not cache the rounded weights: they change with the next step.
    """
    dtype = AUTOCAST_DTYPES.get(precision)
    return torch.autocast(device.type, dtype=dtype, cache_enabled=not is_captured) if dtype else nullcontext()


def make_scaler(precision: Precision, device: torch.device) -> torch.amp.GradScaler:
    """Gradient scaler, switched on for fp16 only."""
    return torch.amp.GradScaler(device.type, enabled=precision == "16-mixed")
