"""What a rank does with a trained network and its share of a split: count what is right, or keep the predictions.

Knows nothing of groups: adding up over ranks is the caller's business.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from tasks.model.infer import Int64s, predictions
from tasks.model.objective import LabelledBatch

Context = AbstractContextManager[object]
Batches = Iterable[tuple[Int64s, LabelledBatch]]
Prediction = tuple[Int64s, npt.NDArray[np.float32], npt.NDArray[np.float32] | None]


def count(network: nn.Module, batches: Batches, context: Context, device: torch.device) -> torch.Tensor:
    """[correct predictions, samples, summed cross-entropy] over the batches, float64 on the device."""
    counts = torch.zeros(3, dtype=torch.float64, device=device)
    for _, batch, logits_NK, _ in predictions(network, batches, context):
        loss = functional.cross_entropy(logits_NK, batch.labels_N, reduction="sum")
        correct = (logits_NK.argmax(1) == batch.labels_N).sum()
        counts += torch.stack([correct.double(), torch.full_like(correct, len(logits_NK)).double(), loss.double()])
    return counts


def predict(network: nn.Module, batches: Batches, context: Context) -> list[Prediction]:
    """Indices, logits and regression targets of every batch, on the host."""
    return [
        (indices_N, logits_NK.cpu().numpy(), None if targets_NT is None else targets_NT.cpu().numpy())
        for indices_N, _, logits_NK, targets_NT in predictions(network, batches, context)
    ]


def warm_up(network: nn.Module, batches: Batches, context: Context) -> None:
    """Predict the first batch and a shorter one, and forget them: what autotunes does it now.

    Both lengths, since the last batch of a split is mostly a shorter one.
    """
    for indices_N, batch in islice(batches, 1):
        for number in {len(indices_N), max(1, len(indices_N) - 1)}:
            shorter = _Images(batch.images_NCHW[:number], batch.labels_N[:number], None, batch.weight)
            for _ in predictions(network, [(indices_N, shorter)], context):
                pass


class _Images(NamedTuple):
    """A batch of which only the images count."""

    images_NCHW: torch.Tensor
    labels_N: torch.Tensor
    targets_NT: torch.Tensor | None
    weight: float


def save_predictions(path: Path, found: list[Prediction], num_classes: int, num_targets: int) -> None:
    """Write `index` (N), `logits` (N x K) and, where there are any, `targets` (N x T); N may be 0."""
    index_N = np.concatenate([np.zeros(0, np.int64), *(indices for indices, _, _ in found)])
    logits_NK = np.concatenate([np.zeros((0, num_classes), np.float32), *(logits for _, logits, _ in found)])
    if not num_targets:
        np.savez(path, index=index_N, logits=logits_NK)
        return
    targets = [target for _, _, target in found if target is not None]
    targets_NT = np.concatenate([np.zeros((0, num_targets), np.float32), *targets])
    np.savez(path, index=index_N, logits=logits_NK, targets=targets_NT)
