"""The training loaders by name, their baseline, which is a plain `DataLoader`, and the loader of evaluation."""

from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from paceline.conf.execution import Loading
from paceline.tasks.data.decode.map_ahead import map_ahead
from paceline.tasks.data.loading.batch import Array, Normalise, pad, set_layout
from paceline.tasks.data.loading.resident import ResidentLoader
from paceline.tasks.data.loading.sampling import Int64s, share
from paceline.tasks.data.loading.streaming import StreamingLoader
from paceline.tasks.data.loading.train_loader import BatchRequest, LoaderConfig, TrainLoader
from paceline.tasks.data.split import Split
from paceline.tasks.model.batch import Batch

Draw = tuple[int, bool, int, int, list[int] | None]
"""Number of a sample, whether it is flipped, the top row and left column of its window, and its crop."""


class SampleDataset(Dataset[tuple[Tensor, int, Tensor]]):
    """Reads, flips, shifts and normalises one sample at a time."""

    def __init__(self, feed: LoaderConfig, scale_C: list[float], bias_C: list[float]) -> None:
        self._feed = feed
        self._scale_C11 = torch.tensor(scale_C).view(-1, 1, 1)
        self._bias_C11 = torch.tensor(bias_C).view(-1, 1, 1)
        self._no_targets = torch.empty(0)

    def __getitem__(self, item: Draw) -> tuple[Tensor, int, Tensor]:
        """One image (C, H, W), its label and its targets (empty where there are none), of an item of `_items`."""
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
    """A DataLoader without workers, in the process of the step, with our order as its batch sampler."""

    def __init__(self, feed: LoaderConfig) -> None:
        super().__init__(feed)
        self._dataset = SampleDataset(feed, self.normalise.scale_C, self.normalise.bias_C)

    def _batches(self, requests: Iterator[BatchRequest]) -> Generator[Batch]:
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


def _items(request: BatchRequest) -> Iterator[Draw]:
    columns = (request.index_N, request.flip_N, request.dy_N, request.dx_N)
    boxes = [None] * len(request.index_N) if request.boxes_N4 is None else request.boxes_N4.tolist()
    return zip(*(column.tolist() for column in columns), boxes, strict=True)


def make_loader(loading: Loading, config: LoaderConfig) -> TrainLoader:
    """Make a training loader; all kinds deliver the same batches in the same order, bit for bit on one device."""
    if loading == "foreground":
        return ForegroundLoader(config)
    if loading == "streaming":
        return StreamingLoader(config)
    if config.photographs is not None:  # resident in the memory of the host
        return StreamingLoader(replace(config, split=config.photographs.in_memory))
    return ResidentLoader(config)


@dataclass(frozen=True)
class EvaluationLoader:
    """Loads samples of a split for evaluation: in order, not augmented. Every batch weighs 1."""

    split: Split
    mean: Sequence[float]  # of each channel, in units of full scale, as is `std`
    std: Sequence[float]
    device: torch.device
    channels_last: bool
    draws: bool = False  # whether batches have random numbers, the same whenever the split is evaluated

    def batches(self, batch_size: int, rank: int = 0, world_size: int = 1) -> Iterator[tuple[Int64s, Batch]]:
        """Yield (sample numbers (N,), batch) over a rank's contiguous share, maybe none; ranks lose and repeat none."""
        first, last = share(0, self.split.num_samples, rank, world_size)
        bounds = ((start, min(start + batch_size, last)) for start in range(first, last, batch_size))
        return self._load(np.arange(start, stop, dtype=np.int64) for start, stop in bounds)

    def batch(self, indices_N: Int64s) -> Batch:
        """Some samples of the split."""
        ((_, batch),) = self._load(iter([indices_N]))
        return batch

    def _load(self, parts: Iterator[Int64s]) -> Iterator[tuple[Int64s, Batch]]:
        split = self.split
        normalise = Normalise(self.mean, self.std, split.image_shape).to(self.device)

        def move(array: Array) -> Tensor:
            return torch.from_numpy(array).to(self.device, non_blocking=True)

        for indices_N, pixels in self._gather(parts):
            images_NCHW = normalise(pixels.to(self.device, non_blocking=True), channels_last=self.channels_last)
            targets_NT = None if split.targets_NT is None else move(split.targets_NT[indices_N])
            noise_seeds_N = move(-1 - indices_N) if self.draws else None  # below those of training, whatever its length
            yield indices_N, Batch(images_NCHW, move(split.labels_N[indices_N]), targets_NT, noise_seeds_N, 1.0)

    def _gather(self, parts: Iterator[Int64s]) -> Iterator[tuple[Int64s, Tensor]]:
        """Gather pixels in host memory; for a GPU pinned, and one batch ahead in a thread."""
        on_gpu = self.device.type == "cuda"

        def gather(indices_N: Int64s) -> Tensor:
            pixels = torch.from_numpy(self.split.gather(indices_N))
            return pixels.pin_memory() if on_gpu else pixels

        if on_gpu:
            with ThreadPoolExecutor(1, thread_name_prefix="paceline-evaluation") as pool:
                yield from map_ahead(pool, gather, parts, 1)
        else:
            yield from ((indices_N, gather(indices_N)) for indices_N in parts)
