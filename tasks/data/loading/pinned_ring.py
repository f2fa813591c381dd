"""The small arrays of a batch, copied to a device as one block without waiting for it."""

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]
_NUM_BLOCKS = 4
_ALIGNMENT = 8  # bytes: the size of the largest type


class PinnedRing:
    """Copies the arrays of one batch after another; on a CPU the tensors share the memory of the arrays.

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
