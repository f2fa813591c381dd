"""Batches gathered from memory-mapped shards, for splits that do not fit the device.

For a GPU a background thread gathers into preallocated buffers. Every call to the device is the consumer's, so that no
second thread disturbs the capture of a CUDA graph. On CPUs a thread would take a core away from the steps, so batches
are gathered on demand: 6.4 x the rate of a per-sample loader on two cores, 3.2 x with a thread (infra/LOG.md,
2026-11-22).
"""

import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from queue import Empty, Full, Queue
from timeit import repeat
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.tasks.data.loading.batch import columns_before_flip, gather_windows, pad, window_numbers, windows
from paceline.tasks.data.loading.pinned_ring import Array
from paceline.tasks.data.loading.sampling import Shuffle
from paceline.tasks.data.loading.train_loader import BatchRequest, LoaderConfig, TrainLoader
from paceline.tasks.data.split import Split
from paceline.tasks.model.batch import Batch

T = TypeVar("T")
QUEUE_SIZE = 3
_COPIES_UNDER_WAY = 2
_NUM_BUFFERS = QUEUE_SIZE + 1 + _COPIES_UNDER_WAY
"""Those in the queue, one being filled, and those whose copies to the device may be under way."""
_POLL_SECONDS = 0.1


class _Filled(NamedTuple):
    request: BatchRequest
    buffer: Tensor


class _Copy(NamedTuple):
    filled: _Filled
    images_NHWC: Tensor
    event: torch.cuda.Event | None


class _Producer:
    """The background thread of one iteration, with its queue and its ring of buffers."""

    def __init__(self, feed: LoaderConfig, requests: Iterator[BatchRequest], largest: int) -> None:
        self._requests = requests
        self._filled: Queue[_Filled | BaseException | None] = Queue(QUEUE_SIZE)
        self.free: Queue[Tensor] = Queue()
        """Buffers that the thread may fill."""
        self._stop = threading.Event()
        pinned = feed.device.type == "cuda"
        for _ in range(_NUM_BUFFERS):
            self.free.put(torch.empty((largest, *feed.split.image_shape), dtype=torch.uint8, pin_memory=pinned))
        self._canvas = Canvas(feed, largest)
        # A daemon: an interpreter that ends without closing the loader must not wait for it.
        self._thread = threading.Thread(target=self._run, name="paceline-streaming", daemon=True)
        self._thread.start()

    def take(self, *, wait: bool) -> _Filled | None:
        """The next filled buffer; None at the end, or when not waiting and none is ready.

        Raises:
            BaseException: What the thread raised.
        """
        while not self._stop.is_set():
            try:
                item = self._filled.get(timeout=_POLL_SECONDS) if wait else self._filled.get_nowait()
            except Empty:
                if wait:
                    continue
                return None
            if item is None or isinstance(item, BaseException):
                self._stop.set()
            if isinstance(item, BaseException):
                raise item
            return item
        return None

    def close(self) -> None:
        """End the thread and wait for it."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            for request in self._requests:
                buffer = self._retry(lambda: self.free.get(timeout=_POLL_SECONDS))
                if buffer is None:
                    return
                self._canvas.batch(request, out=buffer.numpy()[: len(request.index_N)])
                self._put(_Filled(request, buffer))
            self._put(None)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to the consumer
            self._put(error)

    def _put(self, item: _Filled | BaseException | None) -> None:
        self._retry(lambda: self._filled.put(item, timeout=_POLL_SECONDS))

    def _retry(self, use_queue: Callable[[], T]) -> T | None:
        while not self._stop.is_set():
            with suppress(Empty, Full):
                return use_queue()
        return None


class StreamingLoader(TrainLoader):
    """Overlaps reading, copying and computing; holds a few batches and two windows of the shuffle, never the split."""

    def __init__(self, feed: LoaderConfig) -> None:
        super().__init__(feed)
        self.in_background = feed.device.type == "cuda"
        """Whether a thread gathers."""
        self._producers: list[_Producer] = []
        self._canvas: Canvas | None = None
        """Reused in every epoch."""
        self._stream = torch.cuda.Stream(feed.device) if feed.device.type == "cuda" else None

    def close(self) -> None:
        """End background threads."""
        while self._producers:
            self._producers.pop().close()

    def _batches(self, requests: Iterator[BatchRequest]) -> Iterator[Batch]:
        ahead = ReadAhead(self.feed.split, self.feed.shuffle).through(requests)
        largest = self._course.largest_part(self.feed.rank)
        if self.in_background:
            self.close()
            producer = _Producer(self.feed, ahead, largest)
            self._producers.append(producer)
            copies: deque[_Copy] = deque()
            try:
                while self._look_ahead(producer, copies):
                    yield self._finish(producer, copies.popleft())
            finally:
                producer.close()
            return
        if self._canvas is None or self._canvas.largest < largest:
            self._canvas = Canvas(self.feed, largest)
        for request in ahead:
            yield self._batch(request, torch.from_numpy(self._canvas.batch(request)).to(self.feed.device))

    def _look_ahead(self, producer: _Producer, copies: deque[_Copy]) -> bool:
        if not copies:
            filled = producer.take(wait=True)
            if filled is None:
                return False
            copies.append(self._start(filled))
        if self._stream is not None and len(copies) < _COPIES_UNDER_WAY:
            filled = producer.take(wait=False)
            if filled is not None:
                copies.append(self._start(filled))
        return True

    def _start(self, filled: _Filled) -> _Copy:
        pixels = filled.buffer[: len(filled.request.index_N)]
        if self._stream is None:
            return _Copy(filled, pixels, None)
        with torch.cuda.stream(self._stream):
            images_NHWC = pixels.to(self.feed.device, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return _Copy(filled, images_NHWC, event)

    def _finish(self, producer: _Producer, copy: _Copy) -> Batch:
        if copy.event is not None:
            current = torch.cuda.current_stream(self.feed.device)
            current.wait_event(copy.event)
            copy.images_NHWC.record_stream(current)
        batch = self._batch(copy.filled.request, copy.images_NHWC)
        if copy.event is not None:
            copy.event.synchronize()  # waits for a copy that started a step ago; then the buffer may be overwritten
        producer.free.put(copy.filled.buffer)
        return batch

    def _batch(self, request: BatchRequest, images_NHWC: Tensor) -> Batch:
        images_NCHW = self.normalise(images_NHWC, channels_last=self.feed.channels_last)
        split = self.feed.split
        arrays: dict[str, Array] = {"labels_N": split.labels_N[request.index_N]} | self.draw(request)
        if split.targets_NT is not None:
            arrays["targets_NT"] = split.targets_NT[request.index_N]
        parameters = self.ring.copy(arrays)
        return self.answer(request, images_NCHW, parameters["labels_N"], parameters.get("targets_NT"), parameters)


Mirror = Callable[[npt.NDArray[np.uint8]], npt.NDArray[np.uint8]]  # images (N, H, W, C) to the same, left-right
_TRIALS = 5
_BYTES_OF_A_TRIAL = 2**18


class Canvas:
    """Room for one padded batch of at most `largest` samples."""

    def __init__(self, feed: LoaderConfig, largest: int) -> None:
        self._feed = feed
        self.largest = largest
        height, width, channels = feed.split.image_shape
        blank = np.zeros((largest, height, width, channels), dtype=np.uint8)
        self._gathered_NHWC = np.empty_like(blank)
        # Painted once: a batch overwrites what lies inside of the padding, and leaves that as it is.
        self._padded_NHWC = torch.from_numpy(pad(blank, feed.padding, feed.fill_C))
        inside = slice(feed.padding, feed.padding + height), slice(feed.padding, feed.padding + width)
        self._inside_NHWC = self._padded_NHWC.numpy()[:, *inside]
        self._windows = windows(self._padded_NHWC, height, width)
        self._mirror = fastest_mirror(feed.split.image_shape)

    def batch(self, request: BatchRequest, out: npt.NDArray[np.uint8] | None = None) -> npt.NDArray[np.uint8]:
        """The images (N, H, W, C) of a request, in `out` or in a new array."""
        feed, num = self._feed, len(request.index_N)
        photographs, gathered_NHWC = feed.photographs, self._gathered_NHWC[:num]
        if feed.augment == "none":
            if photographs is not None:
                return photographs.gather(request.index_N, out, request.boxes_N4)
            return feed.split.gather(request.index_N, out=out)
        if photographs is not None:
            photographs.gather(request.index_N, gathered_NHWC, request.boxes_N4)
            order_N = np.arange(num)
        else:  # in the order of the shards, which is undone by the windows' numbers at no cost
            order_N = feed.split.gather_by_shard(request.index_N, gathered_NHWC)
        self._inside_NHWC[:num] = self._gathered_NHWC[:num]
        place_N = np.empty(num, dtype=np.int64)
        place_N[order_N] = np.arange(num)
        dx_N = columns_before_flip(request.dx_N, request.flip_N, feed.padding)
        numbers_N = torch.from_numpy(window_numbers(place_N, request.dy_N, dx_N, self._padded_NHWC))
        images_NHWC = gather_windows(self._windows, numbers_N).numpy().reshape(num, *feed.split.image_shape)
        images_NHWC[request.flip_N] = self._mirror(images_NHWC[request.flip_N])
        if out is None:
            return images_NHWC
        np.copyto(out, images_NHWC)
        return out


@lru_cache
def fastest_mirror(image_shape: tuple[int, int, int]) -> Mirror:
    """The one of `mirrors` that is faster on this processor."""
    blank = np.zeros((max(1, _BYTES_OF_A_TRIAL // math.prod(image_shape)), *image_shape), dtype=np.uint8)
    return min(mirrors(image_shape), key=lambda mirror: min(repeat(lambda: mirror(blank), number=1, repeat=_TRIALS)))


def mirrors(image_shape: tuple[int, int, int]) -> tuple[Mirror, Mirror]:
    """Two ways to flip, which give the same pixels.

    Either is two or three times as fast as the other, depending on the processor: of 128 images of 32x32, 0.16 (take)
    and 0.39 ms (flip) on an EPYC, 0.7 and 0.3 ms on a Xeon. A view with negative strides takes longer on both.
    """
    _, width, channels = image_shape
    columns_F = (np.arange(width)[::-1, np.newaxis] * channels + np.arange(channels)).ravel()

    def by_take(images_NHWC: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        rows_NHF = images_NHWC.reshape(*images_NHWC.shape[:2], width * channels)
        return np.take(rows_NHF, columns_F, axis=2).reshape(images_NHWC.shape)

    def by_flip(images_NHWC: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        flipped: npt.NDArray[np.uint8] = torch.from_numpy(images_NHWC).flip(2).numpy()
        return flipped

    return by_take, by_flip


class ReadAhead:
    """Advises the kernel to read one shuffle window ahead."""

    def __init__(self, split: Split, shuffle: Shuffle) -> None:
        self._split = split
        self._shuffle = shuffle
        self._keeps_all = split.num_samples <= shuffle.window
        self._uses: Counter[int] = Counter()
        """By block, samples within the window."""

    def through(self, requests: Iterator[BatchRequest]) -> Iterator[BatchRequest]:
        """Delay each request by a window; none if a window holds the split."""
        if self._keeps_all:
            self._split.will_need(0, self._split.num_samples)
            yield from requests
            return
        ahead: deque[tuple[BatchRequest, Counter[int]]] = deque()
        num_ahead = 0
        for request in requests:
            numbers, counts = np.unique(request.index_N // self._shuffle.block, return_counts=True)
            blocks = Counter(dict(zip(numbers.tolist(), counts.tolist(), strict=True)))
            for block in blocks.keys() - self._uses.keys():
                self._split.will_need(*self._range(block))
            self._uses.update(blocks)
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

    def _leave(self, blocks: Counter[int]) -> None:
        self._uses.subtract(blocks)
        for block in [block for block in blocks if self._uses[block] == 0]:
            del self._uses[block]
            self._split.done_with(*self._range(block))

    def _range(self, block: int) -> tuple[int, int]:
        start = block * self._shuffle.block
        return start, min(start + self._shuffle.block, self._split.num_samples)
