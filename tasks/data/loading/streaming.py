"""Batches gathered from memory-mapped shards, for splits that do not fit the device.

For a GPU a background thread gathers into preallocated buffers. Every call to the device is the consumer's, so that no
second thread disturbs the capture of a CUDA graph. On CPUs a thread would take a core away from the steps, so batches
are gathered on demand: 6.4 x the rate of a per-sample loader on two cores, 3.2 x with a thread (infra/LOG.md,
2026-11-22).
"""

import math
import mmap
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from functools import lru_cache
from queue import Empty, Full, Queue
from timeit import repeat
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from paceline.tasks.data.loading.batch import (
    Array,
    UInt8s,
    columns_before_flip,
    gather_windows,
    pad,
    window_numbers,
    windows,
)
from paceline.tasks.data.loading.sampling import Shuffle
from paceline.tasks.data.loading.train_loader import BatchRequest, LoaderConfig, TrainLoader
from paceline.tasks.data.split import Split
from paceline.tasks.model.batch import Batch

T = TypeVar("T")
QUEUE_SIZE = 3
_COPIES_UNDER_WAY = 2
_NUM_BUFFERS = QUEUE_SIZE + 1 + _COPIES_UNDER_WAY  # in the queue, being filled, and being copied to the device
_POLL_SECONDS = 0.1


_Filled = tuple[BatchRequest, Tensor]  # a request, and a buffer that begins with its images


class _Copy(NamedTuple):
    request: BatchRequest
    buffer: Tensor
    images_NHWC: Tensor
    event: torch.cuda.Event | None


class _Producer:
    """The background thread of one iteration, with its queue and its ring of buffers."""

    def __init__(self, feed: LoaderConfig, requests: Iterator[BatchRequest], largest: int) -> None:
        self._requests = requests
        self._filled: Queue[_Filled | BaseException | None] = Queue(QUEUE_SIZE)
        self.free: Queue[Tensor] = Queue()  # buffers that the thread may fill
        self._stop, self._is_wanted = threading.Event(), threading.Event()
        self._is_wanted.set()
        pinned = feed.device.type == "cuda"
        for _ in range(_NUM_BUFFERS):
            self.free.put(torch.empty((largest, *feed.split.image_shape), dtype=torch.uint8, pin_memory=pinned))
        self._canvas = Canvas(feed, largest)
        # A daemon: an interpreter that ends without closing the loader must not wait for it.
        self._thread = threading.Thread(target=self._run, name="paceline-streaming", daemon=True)
        self._thread.start()

    def take(self, *, wait: bool) -> _Filled | None:
        """The next filled buffer; None at the end, or when not waiting and none is ready; raises the thread's error."""
        self._is_wanted.set()
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

    def pause(self) -> None:
        """Let the thread fill no further buffer until one is taken."""
        self._is_wanted.clear()

    def close(self) -> None:
        """End the thread and wait for it."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            for request in self._requests:
                while not self._is_wanted.wait(_POLL_SECONDS) and not self._stop.is_set():
                    pass
                buffer = self._retry(lambda: self.free.get(timeout=_POLL_SECONDS))
                if buffer is None:
                    return
                self._canvas.batch(request, out=buffer.numpy()[: len(request.index_N)])
                self._put((request, buffer))
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
        self.in_background = feed.device.type == "cuda"  # whether a thread gathers
        self._producers: list[_Producer] = []
        self._canvas: Canvas | None = None  # reused in every epoch
        self._stream = torch.cuda.Stream(feed.device) if feed.device.type == "cuda" else None

    def pause(self) -> None:
        """Read nothing ahead until the next batch is asked for."""
        for producer in self._producers:
            producer.pause()

    def close(self) -> None:
        """End background threads."""
        while self._producers:
            self._producers.pop().close()

    def _batches(self, requests: Iterator[BatchRequest]) -> Generator[Batch]:
        ahead = read_ahead(self.feed.split, self.feed.shuffle, requests)
        largest = self._course.largest_part(self.feed.rank)
        if self.in_background:
            self.close()
            self._producers.append(_Producer(self.feed, ahead, largest))
            yield from self._from_thread(self._producers[0])
            return
        if self._canvas is None or self._canvas.largest < largest:
            self._canvas = Canvas(self.feed, largest)
        for request in ahead:
            yield self._batch(request, torch.from_numpy(self._canvas.batch(request)).to(self.feed.device))

    def _from_thread(self, producer: _Producer) -> Iterator[Batch]:
        copies: deque[_Copy] = deque()
        most = 1 if self._stream is None else _COPIES_UNDER_WAY
        try:
            while True:
                while len(copies) < most and (filled := producer.take(wait=not copies)) is not None:
                    copies.append(self._start(*filled))
                if not copies:
                    return
                yield self._finish(producer, copies.popleft())
        finally:
            producer.close()

    def _start(self, request: BatchRequest, buffer: Tensor) -> _Copy:
        pixels = buffer[: len(request.index_N)]
        if self._stream is None:
            return _Copy(request, buffer, pixels, None)
        with torch.cuda.stream(self._stream):
            images_NHWC = pixels.to(self.feed.device, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return _Copy(request, buffer, images_NHWC, event)

    def _finish(self, producer: _Producer, copy: _Copy) -> Batch:
        if copy.event is not None:
            current = torch.cuda.current_stream(self.feed.device)
            current.wait_event(copy.event)
            copy.images_NHWC.record_stream(current)
        batch = self._batch(copy.request, copy.images_NHWC)
        if copy.event is not None:
            copy.event.synchronize()  # waits for a copy that started a step ago; then the buffer may be overwritten
        producer.free.put(copy.buffer)
        return batch

    def _batch(self, request: BatchRequest, images_NHWC: Tensor) -> Batch:
        split, images_NCHW = self.feed.split, self.normalise(images_NHWC, channels_last=self.feed.channels_last)
        arrays: dict[str, Array] = {"labels_N": split.labels_N[request.index_N]} | self.draw(request)
        if split.targets_NT is not None:
            arrays["targets_NT"] = split.targets_NT[request.index_N]
        parameters = self.ring.copy(arrays)
        return self.answer(request, images_NCHW, parameters["labels_N"], parameters.get("targets_NT"), parameters)


Mirror = Callable[[UInt8s], UInt8s]  # images (N, H, W, C) to the same, left-right
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

    def batch(self, request: BatchRequest, out: UInt8s | None = None) -> UInt8s:
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

    def by_take(images_NHWC: UInt8s) -> UInt8s:
        rows_NHF = images_NHWC.reshape(*images_NHWC.shape[:2], width * channels)
        return np.take(rows_NHF, columns_F, axis=2).reshape(images_NHWC.shape)

    def by_flip(images_NHWC: UInt8s) -> UInt8s:
        return np.asarray(torch.from_numpy(images_NHWC).flip(2).numpy())

    return by_take, by_flip


def read_ahead(split: Split, shuffle: Shuffle, requests: Iterator[BatchRequest]) -> Iterator[BatchRequest]:
    """Delay each request by a shuffle window, which the kernel reads meanwhile; none if a window holds the split."""
    if split.num_samples <= shuffle.window:
        split.advise(0, split.num_samples, mmap.MADV_WILLNEED)
        yield from requests
        return
    ahead: deque[tuple[BatchRequest, Counter[int]]] = deque()
    uses = Counter[int]()  # by block, samples of these requests

    def bounds(block: int) -> tuple[int, int]:
        return block * shuffle.block, min((block + 1) * shuffle.block, split.num_samples)

    def release_first() -> Iterator[BatchRequest]:
        request, blocks = ahead.popleft()
        yield request
        uses.subtract(blocks)
        for block in [block for block in blocks if uses[block] == 0]:
            del uses[block]
            split.advise(*bounds(block), mmap.MADV_DONTNEED)  # lets go of the memory

    for request in requests:
        blocks = Counter[int]((request.index_N // shuffle.block).tolist())
        for block in blocks.keys() - uses.keys():
            split.advise(*bounds(block), mmap.MADV_WILLNEED)
        uses.update(blocks)
        ahead.append((request, blocks))
        while uses.total() > shuffle.window:
            yield from release_first()
    while ahead:
        yield from release_first()
