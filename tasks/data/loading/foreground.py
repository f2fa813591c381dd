"""Sample by sample in the training step's own process and time, the way most projects begin: the baseline.

A plain `torch.utils.data.DataLoader` over a plain `Dataset`. Neither tuned nor hampered.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from paceline.tasks.data.loading.batch import Batch, pad, set_layout
from paceline.tasks.data.loading.train_loader import BatchRequest, LoaderConfig, TrainLoader

Item = tuple[int, bool, int, int]
"""Sample number, flip, top row and left column of the window."""


class SampleDataset(Dataset[tuple[Tensor, int, Tensor]]):
    """Reads, flips, shifts and normalises one sample at a time."""

    def __init__(self, feed: LoaderConfig, scale_C: list[float], bias_C: list[float]) -> None:
        self._split = feed.split
        self._padding = feed.padding
        self._fill_C = feed.fill_C
        self._scale_C11 = torch.tensor(scale_C).view(-1, 1, 1)
        self._bias_C11 = torch.tensor(bias_C).view(-1, 1, 1)
        self._no_targets = torch.empty(0)

    def __getitem__(self, item: Item) -> tuple[Tensor, int, Tensor]:
        """One image (C, H, W), its label and its targets (empty where there are none)."""
        index, flip, dy, dx = item
        height, width, _ = self._split.image_shape
        image_HWC = self._split.image(index)
        if flip:
            image_HWC = image_HWC[:, ::-1]
        image_HWC = pad(image_HWC, self._padding, self._fill_C)[dy : dy + height, dx : dx + width]
        image_CHW = torch.from_numpy(image_HWC.transpose(2, 0, 1).astype(np.float32))
        image_CHW.mul_(self._scale_C11).add_(self._bias_C11)
        targets_NT = self._split.targets_NT
        targets = self._no_targets if targets_NT is None else torch.from_numpy(targets_NT[index])
        return image_CHW, int(self._split.labels_N[index]), targets


class ForegroundLoader(TrainLoader):
    """A DataLoader without workers, with our order as its batch sampler."""

    def __init__(self, feed: LoaderConfig, first_step: int) -> None:
        super().__init__(feed, first_step)
        self._dataset = SampleDataset(feed, self.normalise.scale_C, self.normalise.bias_C)

    def _batches(self, requests: Iterator[BatchRequest]) -> Iterator[Batch]:
        device = self.feed.device
        pending = list(requests)
        batches = DataLoader(
            self._dataset, batch_sampler=[_items(request) for request in pending if len(request.index_N)], num_workers=0
        )
        delivered = iter(batches)
        for request in pending:
            images, labels, targets = next(delivered) if len(request.index_N) else self._empty()
            yield self.answer(
                request,
                set_layout(images.to(device), channels_last=self.feed.channels_last),
                labels.to(device),
                None if self.feed.split.targets_NT is None else targets.to(device),
            )

    def _empty(self) -> tuple[Tensor, Tensor, Tensor]:
        # More ranks than samples in a batch: this rank takes part in the step with nothing.
        height, width, channels = self.feed.split.image_shape
        targets_NT = self.feed.split.targets_NT
        num_targets = 0 if targets_NT is None else targets_NT.shape[1]
        return (
            torch.empty(0, channels, height, width),
            torch.empty(0, dtype=torch.int64),
            torch.empty(0, num_targets),
        )


def _items(request: BatchRequest) -> list[Item]:
    columns = (request.index_N, request.flip_N, request.dy_N, request.dx_N)
    return list(zip(*(column.tolist() for column in columns), strict=True))
