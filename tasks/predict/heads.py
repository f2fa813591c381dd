"""What a network is asked for, by its task: images to a tuple of tensors, and how far two such answers lie apart.

Reduced to what is kept while it is still on the device: probabilities of every pixel would be many times the images.
Shapes: N samples, C channels, H height, W width, K classes, T regression targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from conf.plugins import Task
from tasks.predict.job import Parity
from tasks.records import ModelFacts

Arrays = tuple[npt.NDArray[Any], ...]
"""Of a classifier: probabilities (N, K), and targets (N, T) where it has any, float32. Of a segmentation: classes
(N, H, W), uint8, and the confidence in them, float32: the mean over the pixels of the probability of what is told.
Of a denoiser: pixels (N, H, W, C), uint8."""
FULL_SCALE = 255.0
MAX_LEVELS = 2
"""Of 255. Values of two pictures that differ by no more are taken for equal: below a hundredth of the range."""


class _Probabilities(nn.Module):
    """Classes of images: probabilities, and targets where there are any; float32 whatever it computes in."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images_NCHW: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits_NK, targets_NT = self.network(images_NCHW)
        probabilities_NK = torch.softmax(logits_NK.float(), 1)
        return (probabilities_NK,) if targets_NT is None else (probabilities_NK, targets_NT.float())


class _Masks(nn.Module):
    """Classes of pixels, from 0, and the confidence in those of each image."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images_NCHW: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits_NKHW, _ = self.network(images_NCHW)
        best_NHW, classes_NHW = torch.softmax(logits_NKHW.float(), 1).max(1)
        return classes_NHW.to(torch.uint8), best_NHW.mean(dim=(1, 2))


class _Pictures(nn.Module):
    """Images as pixels again: what `tasks.data.loading.batch.Normalise` does, undone."""

    scale_C: torch.Tensor
    offset_C: torch.Tensor

    def __init__(self, network: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("scale_C", torch.tensor([FULL_SCALE * (deviation or 1.0) for deviation in std]))
        self.register_buffer("offset_C", torch.tensor([FULL_SCALE * average for average in mean]))

    def forward(self, images_NCHW: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found_NCHW, _ = self.network(images_NCHW)
        pixels_NHWC = found_NCHW.float().permute(0, 2, 3, 1) * self.scale_C + self.offset_C
        return (pixels_NHWC.round().clamp(0, FULL_SCALE).to(torch.uint8),)


def with_head(network: nn.Module, facts: ModelFacts) -> nn.Module:
    """A network as its task's answers are asked of it, on its device and in evaluation mode."""
    device = next(network.parameters()).device
    if facts.model.task == "segment":
        return _Masks(network).eval()
    if facts.model.task == "denoise":
        return _Pictures(network, facts.mean, facts.std).to(device).eval()
    return _Probabilities(network).eval()


def compared(task: Task, ours: Arrays, plain: Arrays) -> Parity:
    """How far the answers of two executions of a model lie apart."""
    first, other = ours[0], plain[0]
    if task == "denoise":
        levels = np.abs(first.astype(np.int16) - other.astype(np.int16))
        return Parity(
            num_samples=len(first),
            unit="values",
            agreement=float((levels <= MAX_LEVELS).mean()),
            max_difference=float(levels.max()),
        )
    if task == "segment":
        return Parity(
            num_samples=len(first),
            unit="pixels",
            agreement=float((first == other).mean()),
            max_difference=float(np.abs(ours[1] - plain[1]).max()),
        )
    targets = float(np.abs(ours[1] - plain[1]).max()) if len(ours) > 1 else None
    return Parity(
        num_samples=len(first),
        agreement=float((first.argmax(1) == other.argmax(1)).mean()),
        max_difference=float(np.abs(first - other).max()),
        max_target_difference=targets,
    )
