"""What a rank does with a trained network and its share of a split: add up how well it does, or keep what it tells.

Knows nothing of groups: adding up over ranks is the caller's business.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from paceline.tasks.model.batch import LabelledBatch
from paceline.tasks.model.inference import Int64s, predictions
from paceline.tasks.model.objectives import PixelTask, Task
from paceline.tasks.train.step.micro_batches import take_samples

NUM_WORST, NUM_OTHERS = 4, 2
"""Examples in the report."""
Context = AbstractContextManager[object]
Batches = Iterable[tuple[Int64s, LabelledBatch]]
Kept = tuple[Int64s, npt.NDArray[np.floating], npt.NDArray[np.float32] | None]


def count(network: nn.Module, batches: Batches, context: Context, task: Task, device: torch.device) -> torch.Tensor:
    """[samples, sums of the task's statistics] over the batches, float64 on the device."""
    counts = torch.zeros(1 + task.num_statistics, dtype=torch.float64, device=device)
    for found in predictions(network, batches, context, task):
        statistics_NS = task.statistics(found.outputs, found.batch, found.inputs_NCHW)
        counts[0] += len(statistics_NS)
        counts[1:] += statistics_NS.sum(0)
    return counts


def predict(network: nn.Module, batches: Batches, context: Context, task: Task) -> list[Kept]:
    """Indices, what the task keeps, and regression targets of every batch, on the host."""
    kept = []
    for found in predictions(network, batches, context, task):
        targets_NT = None if found.outputs[1] is None else found.outputs[1].cpu().numpy()
        kept_N = task.select_outputs(found.outputs, found.batch, found.inputs_NCHW)
        kept.append((found.indices_N, kept_N.cpu().numpy(), targets_NT))
    return kept


def warm_up(network: nn.Module, batches: Batches, context: Context, task: Task) -> None:
    """Predict the first batch and a shorter one, and forget them: what autotunes does it now.

    Both lengths, since the last batch of a split is mostly a shorter one.
    """
    for indices_N, batch in islice(batches, 1):
        for number in {len(indices_N), max(1, len(indices_N) - 1)}:
            for _ in predictions(network, [(indices_N[:number], take_samples(batch, 0, number))], context, task):
                pass


def choose_examples(found: list[Kept]) -> Int64s:
    """Indices of the samples with the largest loss, the worst first, and of the first ones; of tasks that keep it."""
    index_N = np.concatenate([indices for indices, _, _ in found])
    loss_N = np.concatenate([kept[:, 0] for _, kept, _ in found])
    worst = index_N[np.argsort(-loss_N, kind="stable")[:NUM_WORST]]
    others = index_N[~np.isin(index_N, worst)][:NUM_OTHERS]
    return np.concatenate([worst, others])


def save_examples(path: Path, network: nn.Module, batch: LabelledBatch, context: Context, task: PixelTask) -> None:
    """Write what the network saw (n, C, H, W), what it told and what is there, as its task shows it."""
    (found,) = predictions(network, [(np.arange(len(batch.labels_N)), batch)], context, task)
    shown = (found.inputs_NCHW, *task.select_example(found.outputs, batch))
    seen, told, there = (values.float().cpu().numpy() for values in shown)
    np.savez(path, seen=seen, told=told, there=there)


def save_predictions(path: Path, found: list[Kept], task: Task, num_targets: int) -> None:
    """Write `index` (N), `kept` (N x K or N x S) and, where there are any, `targets` (N x T); N may be 0."""
    index_N = np.concatenate([np.zeros(0, np.int64), *(indices for indices, _, _ in found)])
    kept = np.concatenate([np.zeros((0, task.num_kept), np.float32), *(kept for _, kept, _ in found)])
    if not num_targets:
        np.savez(path, index=index_N, kept=kept)
        return
    targets = [target for _, _, target in found if target is not None]
    targets_NT = np.concatenate([np.zeros((0, num_targets), np.float32), *targets])
    np.savez(path, index=index_N, kept=kept, targets=targets_NT)
