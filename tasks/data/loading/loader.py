"""The loaders by name, and the baseline: a plain `DataLoader` over a plain `Dataset`, in the process of the step."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from paceline.conf.execution import Loading
from paceline.tasks.data.loading.batch import pad, set_layout
from paceline.tasks.data.loading.resident import ResidentLoader
from paceline.tasks.data.loading.streaming import StreamingLoader
from paceline.tasks.data.loading.train_loader import BatchRequest, LoaderConfig, TrainLoader
from paceline.tasks.model.batch import Batch


class SampleDataset(Dataset[tuple[Tensor, int, Tensor]]):
    """Reads, flips, shifts and normalises one sample at a time."""

    def __init__(self, feed: LoaderConfig, scale_C: list[float], bias_C: list[float]) -> None:
        self._feed = feed
        self._scale_C11 = torch.tensor(scale_C).view(-1, 1, 1)
        self._bias_C11 = torch.tensor(bias_C).view(-1, 1, 1)
        self._no_targets = torch.empty(0)

    def __getitem__(self, item: tuple[int, bool, int, int, list[int] | None]) -> tuple[Tensor, int, Tensor]:
        """One image (C, H, W), its label and its targets (empty where there are none).

        `item` has the sample number, the flip, the top row and left column of the window, and the crop.
        """
        index, flip, dy, dx, box = item
        split, photographs = self._feed.split, self._feed.photographs
        height, width, _ = split.image_shape
        image_HWC = split.image(index) if photographs is None else photographs.image(index, box)
        if flip:
            image_HWC = image_HWC[:, ::-1]
        image_HWC = pad(image_HWC, self._feed.padding, self._feed.fill_C)[dy : dy + height, dx : dx + width]
        image_CHW = torch.from_numpy(image_HWC.transpose(2, 0, 1).astype(np.float32))
        image_CHW.mul_(self._scale_C11).add_(self._bias_C11)
        targets = self._no_targets if split.targets_NT is None else torch.from_numpy(split.targets_NT[index])
        return image_CHW, int(split.labels_N[index]), targets


class ForegroundLoader(TrainLoader):
    """A DataLoader without workers, with our order as its batch sampler."""

    def __init__(self, feed: LoaderConfig) -> None:
        super().__init__(feed)
        self._dataset = SampleDataset(feed, self.normalise.scale_C, self.normalise.bias_C)

    def _batches(self, requests: Iterator[BatchRequest]) -> Iterator[Batch]:
        device, split = self.feed.device, self.feed.split
        height, width, channels = split.image_shape
        num_targets = 0 if split.targets_NT is None else split.targets_NT.shape[1]
        # More ranks than samples in a batch: this rank takes part in the step with nothing.
        empty = torch.empty(0, channels, height, width), torch.empty(0, dtype=torch.int64), torch.empty(0, num_targets)
        pending = list(requests)
        items = [list(_items(request)) for request in pending]
        delivered = iter(DataLoader(self._dataset, batch_sampler=[batch for batch in items if batch], num_workers=0))
        for request in pending:
            images, labels, targets = next(delivered) if len(request.index_N) else empty
            yield self.answer(
                request,
                set_layout(images.to(device), channels_last=self.feed.channels_last),
                labels.to(device),
                None if split.targets_NT is None else targets.to(device),
                self.ring.copy(self.draw(request)),
            )


def _items(request: BatchRequest) -> Iterator[tuple[int, bool, int, int, list[int] | None]]:
    columns = (request.index_N, request.flip_N, request.dy_N, request.dx_N)
    boxes = [None] * len(request.index_N) if request.boxes_N4 is None else request.boxes_N4.tolist()
    return zip(*(column.tolist() for column in columns), boxes, strict=True)


_LOADERS: dict[Loading, type[TrainLoader]] = {
    "resident": ResidentLoader,
    "streaming": StreamingLoader,
    "foreground": ForegroundLoader,
}


def make_loader(loading: Loading, config: LoaderConfig) -> TrainLoader:
    """Make a training loader; all kinds deliver the same batches in the same order, bit for bit on one device.

    Photographs that are cropped stay in the memory of the host where they are resident.
    """
    photographs = config.photographs
    if loading == "resident" and photographs is not None:
        return StreamingLoader(replace(config, split=photographs.in_memory))
    return _LOADERS[loading](config)
