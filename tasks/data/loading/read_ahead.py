"""Asks the kernel for the parts of a split that come next, and lets go of those that are done with.

Needs no thread: the kernel reads while the device computes. What stays in this process's memory is bounded by two
windows of the shuffle, one that is being read and one that is being used; the page cache may keep more, and gives it
back when memory is asked for.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tasks.data.loading.sampling import Shuffle
from tasks.data.loading.train_loader import Request
from tasks.data.split import Split


class ReadAhead:
    """Looks one window ahead of what is asked for.

    Args:
        split: on disk.
        shuffle: by which its samples are ordered.
    """

    def __init__(self, split: Split, shuffle: Shuffle) -> None:
        self._split = split
        self._shuffle = shuffle
        self._keeps_all = split.num_samples <= shuffle.window
        self._uses: Counter[int] = Counter()
        """Samples of a block that are ahead, of the blocks that were asked for."""

    def through(self, requests: Iterator[Request]) -> Iterator[Request]:
        """The same requests, each a window later, or at once where a window holds them all."""
        if self._keeps_all:
            self._split.will_need(0, self._split.num_samples)
            yield from requests
            return
        ahead: deque[tuple[Request, Counter[int]]] = deque()
        num_ahead = 0
        for request in requests:
            blocks = self._blocks(request.index_N)
            self._enter(blocks)
            ahead.append((request, blocks))
            num_ahead += len(request.index_N)
            while num_ahead > self._shuffle.window:
                first, its_blocks = ahead.popleft()
                num_ahead -= len(first.index_N)
                yield first
                self._leave(its_blocks)
        for first, its_blocks in ahead:
            yield first
            self._leave(its_blocks)

    def _blocks(self, index_N: npt.NDArray[np.int64]) -> Counter[int]:
        blocks, counts = np.unique(index_N // self._shuffle.block, return_counts=True)
        return Counter(dict(zip(blocks.tolist(), counts.tolist(), strict=True)))

    def _enter(self, blocks: Counter[int]) -> None:
        for block in blocks.keys() - self._uses.keys():
            self._split.will_need(*self._range(block))
        self._uses.update(blocks)

    def _leave(self, blocks: Counter[int]) -> None:
        self._uses.subtract(blocks)
        for block in [block for block in blocks if self._uses[block] == 0]:
            del self._uses[block]
            self._split.done_with(*self._range(block))

    def _range(self, block: int) -> tuple[int, int]:
        start = block * self._shuffle.block
        return start, min(start + self._shuffle.block, self._split.num_samples)
