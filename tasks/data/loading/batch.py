"""Arithmetic on pixels that all loaders share, so that batches are equal bit for bit, and copies to the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.tasks.data.loading.sampling import Int64s

# Shape suffixes: N samples, C channels, H height, W width, T targets, F = H * W * C, M windows.

UInt8s = npt.NDArray[np.uint8]
Array = npt.NDArray[Any]
_NUM_BLOCKS = 4
_ALIGNMENT = 8  # bytes: the size of the largest type


class Normalise:
    """(pixels / 255 - mean) / std, as one multiplication and one addition per value, in float32."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], image_shape: Sequence[int]) -> None:
        # A channel without variance (all images blank in it) would divide by zero; it stays unscaled.
        self.scale_C = [1.0 / (255.0 * (deviation or 1.0)) for deviation in std]
        self.bias_C = [-average / (deviation or 1.0) for average, deviation in zip(mean, std, strict=True)]
        height, width, _ = image_shape
        rows = torch.tensor(self.scale_C), torch.tensor(self.bias_C)
        self._rows_NHWC = tuple(row.repeat(height * width) for row in rows)
        self._rows_NCHW = tuple(row.repeat_interleave(height * width) for row in rows)

    def to(self, device: torch.device) -> Normalise:
        """Move the constants to a device; returns self."""
        self._rows_NHWC = tuple(row.to(device) for row in self._rows_NHWC)
        self._rows_NCHW = tuple(row.to(device) for row in self._rows_NCHW)
        return self

    def __call__(self, images_NHWC: Tensor, *, channels_last: bool) -> Tensor:
        """Normalise uint8 NHWC pixels to float32 NCHW in the requested memory format.

        The constants are rows as long as an image: broadcasting over an inner axis of 3 channels would not vectorise.
        Not `addcmul`: its fused multiply-add rounds otherwise at the ends of vectors, and loaders could differ.
        """
        num, height, width, channels = images_NHWC.shape
        scale_F, bias_F = self._rows_NHWC if channels_last else self._rows_NCHW
        pixels = images_NHWC if channels_last else images_NHWC.permute(0, 3, 1, 2)
        values_NF = pixels.reshape(num, height * width * channels).to(torch.float32).mul_(scale_F).add_(bias_F)
        if channels_last:
            return values_NF.view(num, height, width, channels).permute(0, 3, 1, 2)
        return values_NF.view(num, channels, height, width)


def set_layout(images_NCHW: Tensor, *, channels_last: bool) -> Tensor:
    """Images in a memory format, by their strides too: convolutions go by these where one channel fits both formats."""
    if not channels_last:
        return images_NCHW.contiguous()
    num, channels, height, width = images_NCHW.shape
    if channels == 1:
        return images_NCHW.reshape(num, height, width, 1).permute(0, 3, 1, 2)
    return images_NCHW.contiguous(memory_format=torch.channels_last)


def pad(images: UInt8s, width: int, fill_C: UInt8s) -> UInt8s:
    """Surround images (..., H, W, C) with `width` pixels of a colour on each side."""
    if width == 0:
        return images
    *lead, height, breadth, channels = images.shape
    padded = np.empty((*lead, height + 2 * width, breadth + 2 * width, channels), dtype=np.uint8)
    padded[...] = fill_C
    padded[..., width:-width, width:-width, :] = images
    return padded


def windows(padded_NHWC: Tensor, height: int, width: int) -> Tensor:
    """Windows of padded images, a view (M, height, width * C) by `window_numbers`; none across two images is used."""
    num, tall, wide, channels = padded_NHWC.shape
    last = (height - 1) * wide + width
    shape = (max(0, num * tall * wide - last + 1), height, width * channels)
    return padded_NHWC.as_strided(shape, (channels, wide * channels, 1))


def window_numbers(image_N: Int64s, dy_N: Int64s, dx_N: Int64s, padded_NHWC: Tensor) -> Int64s:
    """Numbers (N,) of the windows that begin at row dy and column dx of images."""
    _, tall, wide, _ = padded_NHWC.shape
    return (image_N * tall + dy_N) * wide + dx_N


def columns_before_flip(dx_N: Int64s, flip_N: npt.NDArray[np.bool_], padding: int) -> Int64s:
    """Columns (N,) of the windows to take where flips come last: of a flipped image, that of the opposite window."""
    return np.where(flip_N, 2 * padding - dx_N, dx_N)


def gather_windows(view: Tensor, numbers_N: Tensor) -> Tensor:
    """Copy windows (N, height, width * C), in one indexing; `numbers_N` is on the device of the view.

    On CPUs numpy does it: it copies whole rows where torch's index kernel goes byte by byte (measured 2026-11-21 at
    CIFAR size, one thread: 2.6 M against 0.39 M images/s).
    """
    if view.device.type == "cpu":
        return torch.from_numpy(view.numpy()[numbers_N.numpy()])
    return view[numbers_N]


class PinnedRing:
    """Copies the small arrays of a batch as one block, without waiting; on a CPU the tensors share their memory.

    On a GPU the copies have a stream of their own: they overtake queued kernels, so that a block is soon free again.
    A block is not overwritten before its copy has ended.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._blocks: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def copy(self, arrays: Mapping[str, Array]) -> dict[str, Tensor]:
        """Copy arrays; return tensors of their names, types and shapes, which the current stream may use."""
        if self._stream is None:
            return {name: torch.from_numpy(array) for name, array in arrays.items()}
        sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays.values()]
        block, event = self._take(sum(sizes))
        for array, part in zip(arrays.values(), block.split(sizes), strict=True):
            part.numpy()[: array.nbytes].view(array.dtype)[:] = array.ravel()
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            copied = block.to(self._device, non_blocking=True)
            event.record(self._stream)
        current.wait_event(event)
        copied.record_stream(current)
        return {
            name: part[: array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
            for (name, array), part in zip(arrays.items(), copied.split(sizes), strict=True)
        }

    def _take(self, size: int) -> tuple[Tensor, torch.cuda.Event]:
        """The next block that may be written, and the event of its copy."""
        block, event = self._blocks.popleft() if len(self._blocks) == _NUM_BLOCKS else (None, torch.cuda.Event())
        if block is not None and not event.query():
            event.synchronize()
        if block is None or len(block) < size:
            block = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self._blocks.append((block, event))
        return block[:size], event
