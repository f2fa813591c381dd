"""Outputs of a network by task, or of a layer: images to a tuple of tensors, and the difference of two executions.

Outputs are reduced on the device: probabilities of every pixel would be many times larger than the images.
Shapes: N samples, C channels, H height, W width, K classes, T regression targets, D values of a layer.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from paceline.conf.plugins import Task
from paceline.tasks.model.transfer import Activations
from paceline.tasks.predict.job import Parity, Unit
from paceline.tasks.records.data import ModelFacts

Arrays = tuple[npt.NDArray[Any], ...]
"""Of a classifier: probabilities (N, K), and targets (N, T) where it has any, float32. Of a segmentation: classes
(N, H, W), uint8, and the confidence in them, float32: the probability of each pixel's class, or its mean over an image.
Of a denoiser: pixels (N, H, W, C), uint8. Of a layer: features (N, D), float32."""
Asked = Task | Literal["features"]  # the output of a task, or the features of a layer
FULL_SCALE = 255.0
MAX_LEVELS = 2  # of 255: values of two pictures that differ by no more, below a hundredth of the range, are equal
MIN_COSINE = 0.99  # of the angle between features in two executions that count as the same


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
    """Classes of pixels, from 0, and the confidence in those of each image, or in each pixel's."""

    def __init__(self, network: nn.Module, *, each_pixel: bool) -> None:
        super().__init__()
        self.network, self.each_pixel = network, each_pixel

    def forward(self, images_NCHW: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits_NKHW, _ = self.network(images_NCHW)
        best_NHW, classes_NHW = torch.softmax(logits_NKHW.float(), 1).max(1)
        return classes_NHW.to(torch.uint8), best_NHW if self.each_pixel else best_NHW.mean(dim=(1, 2))


class _Pictures(nn.Module):
    """Images as pixels again: what `paceline.tasks.data.loading.batch.Normalise` does, undone."""

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


def with_head(
    network: nn.Module, facts: ModelFacts, layer: str | None = None, *, each_pixel: bool = False
) -> nn.Module:
    """Outputs of a network or a layer's features, in evaluation mode; `each_pixel`: the confidence in each pixel."""
    if layer is not None:
        return Activations(network, layer).eval()
    device = next(network.parameters()).device
    if facts.model.task == "segment":
        return _Masks(network, each_pixel=each_pixel).eval()
    if facts.model.task == "denoise":
        return _Pictures(network, facts.mean, facts.std).to(device).eval()
    return _Probabilities(network).eval()


def compare_outputs(asked: Asked, ours: Arrays, plain: Arrays) -> Parity:
    """Compare the outputs of two executions of a model."""
    first, other = ours[0], plain[0]
    unit: Unit = "samples"
    target_difference = None
    if asked == "features":
        unit, agrees, differences = "features", _cosines(first, other) >= MIN_COSINE, first - other
    elif asked == "denoise":
        differences = first.astype(np.int16) - other.astype(np.int16)
        unit, agrees = "values", np.abs(differences) <= MAX_LEVELS
    elif asked == "segment":
        unit, agrees, differences = "pixels", first == other, ours[1] - plain[1]
    else:
        agrees, differences = first.argmax(1) == other.argmax(1), first - other
        if len(ours) > 1:
            target_difference = float(np.abs(ours[1] - plain[1]).max())
    return Parity(
        num_samples=len(first),
        unit=unit,
        agreement=float(agrees.mean()),
        max_difference=float(np.abs(differences).max()),
        max_target_difference=target_difference,
    )


def _cosines(ours_ND: npt.NDArray[np.float32], plain_ND: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Cosines of the angles between rows; 1 where both are zero, and 0 where one is."""
    ours, plain = ours_ND.astype(np.float64), plain_ND.astype(np.float64)
    norms_N = np.linalg.norm(ours, axis=1) * np.linalg.norm(plain, axis=1)
    are_zero_N = ~(ours.any(axis=1) | plain.any(axis=1))
    return np.where(are_zero_N, 1.0, (ours * plain).sum(1) / np.where(norms_N > 0, norms_N, 1))
