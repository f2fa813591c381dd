"""Precision and memory format of a network, the same in trainings and probes."""

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

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


def set_arithmetic(precision: Precision, device: torch.device) -> None:
    """Set how a GPU computes fp32 from now on: in TF32 for `tf32`, else in IEEE fp32; cuDNN measures its algorithms.

    The mode is the process's: arms of a probe set it before each block. On CPUs nothing changes.
    """
    if device.type != "cuda":
        return
    arithmetic = "tf32" if precision == "tf32" else "ieee"
    cudnn: Any = torch.backends.cudnn
    switches = (cudnn, cudnn.conv, cudnn.rnn)
    states = {switch.fp32_precision for switch in (*switches, torch.backends.cuda.matmul)}
    if cudnn.benchmark and states == {arithmetic}:
        return
    # torch's older and newer switches must agree: reading an older one, as Lightning, the profiler and Inductor do, is
    # an error where the newer one alone was set (torch 2.13).
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use the new API settings")  # of torch 2.11
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        cudnn.allow_tf32 = precision == "tf32"
    for switch in switches:
        switch.fp32_precision = arithmetic
    cudnn.benchmark = True


def lightning_precision(precision: Precision) -> Literal["32-true", "64-true", "bf16-mixed", "16-mixed"]:
    """The precision for Lightning's Trainer, which knows TF32 as 32-true on a process that is set to it."""
    return "32-true" if precision == "tf32" else precision


def forward_context(
    precision: Precision, device: torch.device, *, is_captured: bool = False
) -> AbstractContextManager[object]:
    """The autocast region of a forward pass, or nothing for the true precisions."""
    dtype = AUTOCAST_DTYPES.get(precision)
    # A CUDA graph must not cache the rounded weights: they change with the next step.
    return torch.autocast(device.type, dtype=dtype, cache_enabled=not is_captured) if dtype else nullcontext()


def make_scaler(precision: Precision, device: torch.device) -> torch.amp.GradScaler:
    """Gradient scaler, switched on for fp16 only."""
    return torch.amp.GradScaler(device.type, enabled=precision == "16-mixed")
