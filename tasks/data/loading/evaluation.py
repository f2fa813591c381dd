"""Batches for evaluation: in order, not augmented, each sample exactly once over all ranks."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from paceline.tasks.data.decode.map_ahead import map_ahead
from paceline.tasks.data.loading.batch import Normalise, on_device
from paceline.tasks.data.loading.sampling import share
from paceline.tasks.data.split import Split
from paceline.tasks.model.batch import Batch

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class EvaluationLoader:
    """Loads samples of a split as they are evaluated. Every batch weighs 1."""

    split: Split
    mean: Sequence[float]  # of each channel, in units of full scale, as is `std`
    std: Sequence[float]
    device: torch.device
    channels_last: bool
    draws: bool = False  # whether batches have random numbers, the same whenever the split is evaluated

    def batches(self, batch_size: int, rank: int = 0, world_size: int = 1) -> Iterator[tuple[Indices, Batch]]:
        """Yield (sample numbers (N,), batch) over a rank's contiguous share of the split.

        Nothing is dropped or repeated, whatever the number of ranks; a rank may have no batch at all.
        """
        first, last = share(0, self.split.num_samples, rank, world_size)
        bounds = ((start, min(start + batch_size, last)) for start in range(first, last, batch_size))
        return self._load(np.arange(start, stop, dtype=np.int64) for start, stop in bounds)

    def batch(self, indices_N: Indices) -> Batch:
        """Some samples of the split."""
        ((_, batch),) = self._load(iter([indices_N]))
        return batch

    def _load(self, parts: Iterator[Indices]) -> Iterator[tuple[Indices, Batch]]:
        split, device = self.split, self.device
        normalise = Normalise(self.mean, self.std, split.image_shape).to(device)
        for indices_N, pixels in self._gather(parts):
            images_NCHW = normalise(pixels.to(device, non_blocking=True), channels_last=self.channels_last)
            targets = None if split.targets_NT is None else split.targets_NT[indices_N]
            labels_N, targets_NT = on_device(split.labels_N[indices_N], targets, device)
            # Below those of training, whatever its length.
            noise_seeds_N = torch.from_numpy(-1 - indices_N).to(device, non_blocking=True) if self.draws else None
            yield indices_N, Batch(images_NCHW, labels_N, targets_NT, noise_seeds_N, 1.0)

    def _gather(self, parts: Iterator[Indices]) -> Iterator[tuple[Indices, torch.Tensor]]:
        """Gather pixels in host memory; for a GPU pinned, and one batch ahead in a thread."""
        on_gpu = self.device.type == "cuda"

        def gather(indices_N: Indices) -> torch.Tensor:
            pixels = torch.from_numpy(self.split.gather(indices_N))
            return pixels.pin_memory() if on_gpu else pixels

        if on_gpu:
            with ThreadPoolExecutor(1, thread_name_prefix="paceline-evaluation") as pool:
                yield from map_ahead(pool, gather, parts, 1)
        else:
            yield from ((indices_N, gather(indices_N)) for indices_N in parts)
