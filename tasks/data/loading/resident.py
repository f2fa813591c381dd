"""The whole split on the device as uint8; a batch is one indexed gather of augmented windows."""

import math
from collections.abc import Generator, Iterator
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import psutil
import torch
from torch import Tensor

from paceline.conf.recipe import FLIPPING
from paceline.tasks.data.loading.batch import Array, columns_before_flip, gather_windows, pad, window_numbers, windows
from paceline.tasks.data.loading.train_loader import BatchRequest, LoaderConfig, TrainLoader
from paceline.tasks.data.split import Split
from paceline.tasks.model.batch import Batch

_PAD_AT_ONCE = 4_096
_MIRROR_SHARE = 0.25  # of the free memory, for a second, flipped copy; above it, batches are flipped one by one
_SHARED: WeakKeyDictionary[Split, WeakValueDictionary[tuple[object, ...], Tensor]] = WeakKeyDictionary()
"""The sets that live on a device; loaders of the arms of a probe share one."""


class ResidentLoader(TrainLoader):
    """Augments on the device from a padded copy, and from a flipped one where memory permits."""

    def __init__(self, feed: LoaderConfig) -> None:
        super().__init__(feed)
        shared = _SHARED.setdefault(feed.split, WeakValueDictionary())
        key = (feed.device, feed.padding, feed.augment, feed.fill_C.tobytes())
        padded_NHWC = shared.get(key)
        self._padded_NHWC = _load(feed) if padded_NHWC is None else padded_NHWC
        shared[key] = self._padded_NHWC
        self._mirrored = len(self._padded_NHWC) > feed.split.num_samples
        self._windows = windows(self._padded_NHWC, *feed.split.image_shape[:2])
        self._labels_N = torch.from_numpy(feed.split.labels_N).to(feed.device)
        targets_NT = feed.split.targets_NT
        self._targets_NT = None if targets_NT is None else torch.from_numpy(targets_NT).to(feed.device)

    def _batches(self, requests: Iterator[BatchRequest]) -> Generator[Batch]:
        channels_last = self.feed.channels_last
        for request in requests:
            numbers: dict[str, Array] = {"index_N": request.index_N}
            image_N, dx_N = request.index_N, request.dx_N
            if self._mirrored:
                image_N = image_N + request.flip_N * self.feed.split.num_samples
            elif request.flip_N.any():  # flips that are left to do
                dx_N = columns_before_flip(dx_N, request.flip_N, self.feed.padding)
                numbers["flip_N"] = request.flip_N
            numbers["windows_N"] = window_numbers(image_N, request.dy_N, dx_N, self._padded_NHWC)
            parameters = self.ring.copy(numbers | self.draw(request))
            images_NHWC = gather_windows(self._windows, parameters["windows_N"])
            images_NHWC = images_NHWC.view(len(request.index_N), *self.feed.split.image_shape)
            if "flip_N" in parameters:
                flip = parameters["flip_N"].view(-1, 1, 1, 1)
                images_NHWC = torch.where(flip, images_NHWC.flip(2), images_NHWC)
            images_NCHW = self.normalise(images_NHWC, channels_last=channels_last)
            index = parameters["index_N"]
            targets = None if self._targets_NT is None else self._targets_NT[index]
            yield self.answer(request, images_NCHW, self._labels_N[index], targets, parameters)


def _load(feed: LoaderConfig) -> Tensor:
    """The padded split on the device, followed by its mirror images where they are used and fit."""
    split, width = feed.split, feed.padding
    num, (height, breadth, channels) = split.num_samples, split.image_shape
    shape = (height + 2 * width, breadth + 2 * width, channels)
    mirrored = feed.augment in FLIPPING and num * math.prod(shape) < _MIRROR_SHARE * free_bytes(feed.device)
    padded_NHWC = torch.empty(((1 + mirrored) * num, *shape), dtype=torch.uint8, device=feed.device)
    for start in range(0, num, _PAD_AT_ONCE):
        stop = min(start + _PAD_AT_ONCE, num)
        part = torch.from_numpy(pad(split.gather(np.arange(start, stop)), width, feed.fill_C)).to(feed.device)
        padded_NHWC[start:stop] = part
        if mirrored:
            padded_NHWC[num + start : num + stop] = part.flip(2)
    return padded_NHWC


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
