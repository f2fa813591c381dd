"""Batches for evaluation: in order, not augmented, each sample exactly once over all ranks."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from paceline.tasks.data.decode.map_ahead import map_ahead
from paceline.tasks.data.loading.batch import Normalise, on_device
from paceline.tasks.data.loading.sampling import share
from paceline.tasks.data.split import Split
from paceline.tasks.model.batch import Batch

Indices = npt.NDArray[np.int64]


def evaluation_batches(  # noqa: PLR0913, PLR0917 - the feed of a rank, flat because it is called from one place
    split: Split,
    mean: Sequence[float],
    std: Sequence[float],
    batch_size: int,
    rank: int,
    world_size: int,
    device: torch.device,
    channels_last: bool,
    draws: bool = False,
) -> Iterator[tuple[Indices, Batch]]:
    """Yield (sample numbers (N,), batch) over a rank's contiguous share of a split.

    Nothing is dropped or repeated, whatever the number of ranks; a rank may have no batch at all. Every batch weighs 1.
    Random numbers (`draws`) are the same whenever a split is evaluated. `mean` and `std` are in units of full scale.
    """
    normalise = Normalise(mean, std, split.image_shape).to(device)
    first, last = share(0, split.num_samples, rank, world_size)
    bounds = ((start, min(start + batch_size, last)) for start in range(first, last, batch_size))
    parts = (np.arange(start, stop, dtype=np.int64) for start, stop in bounds)
    for indices_N, pixels in _gather(split, parts, device):
        yield indices_N, _on_device(split, indices_N, pixels, normalise, device, channels_last, draws)


def _gather(split: Split, parts: Iterator[Indices], device: torch.device) -> Iterator[tuple[Indices, torch.Tensor]]:
    """Gather pixels in host memory; for a GPU pinned, and one batch ahead in a thread."""

    def gather(indices_N: Indices) -> torch.Tensor:
        pixels = torch.from_numpy(split.gather(indices_N))
        return pixels.pin_memory() if device.type == "cuda" else pixels

    if device.type == "cuda":
        with ThreadPoolExecutor(1, thread_name_prefix="paceline-evaluation") as pool:
            yield from map_ahead(pool, gather, parts, 1)
    else:
        yield from ((indices_N, gather(indices_N)) for indices_N in parts)


def evaluation_batch(
    split: Split,
    indices_N: Indices,
    normalise: Normalise,
    device: torch.device,
    channels_last: bool,
    draws: bool,
) -> Batch:
    """Some samples of a split as they are evaluated; the arguments as in `evaluation_batches`."""
    ((_, pixels),) = _gather(split, iter([indices_N]), device)
    return _on_device(split, indices_N, pixels, normalise, device, channels_last, draws)


def _on_device(
    split: Split,
    indices_N: Indices,
    pixels: torch.Tensor,
    normalise: Normalise,
    device: torch.device,
    channels_last: bool,
    draws: bool,
) -> Batch:
    pixels = pixels.to(device, non_blocking=True)
    targets = None if split.targets_NT is None else split.targets_NT[indices_N]
    labels_N, targets_NT = on_device(split.labels_N[indices_N], targets, device)
    # Below those of training, whatever its length.
    noise_seeds_N = torch.from_numpy(-1 - indices_N).to(device, non_blocking=True) if draws else None
    return Batch(normalise(pixels, channels_last=channels_last), labels_N, targets_NT, noise_seeds_N, 1.0)
