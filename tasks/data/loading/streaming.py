"""Batches gathered from memory-mapped shards, for splits that do not fit the device.

The kernel reads ahead of both ways. For a GPU a background thread gathers: it touches numpy and preallocated buffers
only; every call to the device is the consumer's, so that a CUDA graph being captured there is never disturbed from a
second thread. On CPUs a thread would take a core away from the steps and wait for it, so batches are gathered when they
are asked for: 6.4 x the rate of a per-sample loader on two cores, 3.2 x with a thread (infra/LOG.md, 2026-11-22).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from queue import Empty, Full, Queue

import torch
from torch import Tensor

from tasks.data.loading.batch import Batch, on_device
from tasks.data.loading.canvas import Canvas
from tasks.data.loading.read_ahead import ReadAhead
from tasks.data.loading.train_loader import Feed, Request, TrainLoader

QUEUE_SIZE = 3
_COPIES_UNDER_WAY = 2
_NUM_BUFFERS = QUEUE_SIZE + 1 + _COPIES_UNDER_WAY
"""Those in the queue, one being filled, and those whose copies to the device may be under way."""
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class _Filled:
    """A request with its pixels in a buffer."""

    request: Request
    buffer: Tensor


@dataclass(frozen=True)
class _Copy:
    """Pixels on their way to the device."""

    filled: _Filled
    images_NHWC: Tensor
    event: torch.cuda.Event | None


class _Producer:
    """The background thread of one iteration, with its queue and its ring of buffers."""

    def __init__(self, feed: Feed, requests: Iterator[Request], largest: int) -> None:
        self._feed = feed
        self._requests = requests
        self._filled: Queue[_Filled | BaseException | None] = Queue(QUEUE_SIZE)
        self._free: Queue[Tensor] = Queue()
        self._stop = threading.Event()
        pinned = feed.device.type == "cuda"
        for _ in range(_NUM_BUFFERS):
            self._free.put(torch.empty((largest, *feed.split.image_shape), dtype=torch.uint8, pin_memory=pinned))
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

    def give_back(self, buffer: Tensor) -> None:
        """Let the thread fill a buffer again."""
        self._free.put(buffer)

    def close(self) -> None:
        """End the thread and wait for it."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            for request in self._requests:
                buffer = self._wait_for_buffer()
                if buffer is None:
                    return
                self._canvas.batch(request, out=buffer.numpy()[: len(request.index_N)])
                if not self._put(_Filled(request, buffer)):
                    return
            self._put(None)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to the consumer
            self._put(error)

    def _wait_for_buffer(self) -> Tensor | None:
        while not self._stop.is_set():
            try:
                return self._free.get(timeout=_POLL_SECONDS)
            except Empty:
                continue
        return None

    def _put(self, item: _Filled | BaseException | None) -> bool:
        while not self._stop.is_set():
            try:
                self._filled.put(item, timeout=_POLL_SECONDS)
            except Full:
                continue
            return True
        return False


class StreamingLoader(TrainLoader):
    """Overlaps reading, copying and computing; holds a few batches and two windows of the shuffle, never the split."""

    def __init__(self, feed: Feed, first_step: int) -> None:
        super().__init__(feed, first_step)
        self.in_background = feed.device.type == "cuda"
        """Whether a thread gathers."""
        self._producers: list[_Producer] = []
        self._canvas: Canvas | None = None
        """Kept from epoch to epoch."""
        self._stream = torch.cuda.Stream(feed.device) if feed.device.type == "cuda" else None

    def close(self) -> None:
        """End background threads."""
        while self._producers:
            self._producers.pop().close()

    def _batches(self, requests: Iterator[Request]) -> Iterator[Batch]:
        ahead = ReadAhead(self.feed.split, self.feed.shuffle).through(requests)
        return self._from_thread(ahead) if self.in_background else self._when_asked(ahead)

    def _when_asked(self, requests: Iterator[Request]) -> Iterator[Batch]:
        largest = self._course.largest_part(self.feed.rank)
        if self._canvas is None or self._canvas.largest < largest:
            self._canvas = Canvas(self.feed, largest)
        for request in requests:
            yield self._batch(request, torch.from_numpy(self._canvas.batch(request)).to(self.feed.device))

    def _from_thread(self, requests: Iterator[Request]) -> Iterator[Batch]:
        self.close()
        producer = _Producer(self.feed, requests, self._course.largest_part(self.feed.rank))
        self._producers.append(producer)
        copies: deque[_Copy] = deque()
        try:
            while self._look_ahead(producer, copies):
                yield self._finish(producer, copies.popleft())
        finally:
            producer.close()

    def _look_ahead(self, producer: _Producer, copies: deque[_Copy]) -> bool:
        """Have the next copy under way, and on CUDA the one after it too, while the device computes."""
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
            copy.event.synchronize()  # of the copy alone, begun a step ago; the buffer may be overwritten now
        producer.give_back(copy.filled.buffer)
        return batch

    def _batch(self, request: Request, images_NHWC: Tensor) -> Batch:
        images_NCHW = self.normalise(images_NHWC, channels_last=self.feed.channels_last)
        split = self.feed.split
        targets = None if split.targets_NT is None else split.targets_NT[request.index_N]
        labels_N, targets_NT = on_device(split.labels_N[request.index_N], targets, self.feed.device)
        return self.answer(request, images_NCHW, labels_N, targets_NT)
