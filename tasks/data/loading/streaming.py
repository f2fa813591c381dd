"""Batches gathered from memory-mapped shards by a background thread, for splits that do not fit the device.

The thread touches numpy and preallocated buffers only; every call to the device is the consumer's, so that a CUDA graph
being captured there is never disturbed from a second thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from queue import Empty, Full, Queue

import numpy as np
import torch
from torch import Tensor

from tasks.data.loading.batch import Batch, gather_windows, on_device, pad, window_numbers, windows
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
        height, width, channels = feed.split.image_shape
        canvas = np.zeros((largest, height, width, channels), dtype=np.uint8)
        # Painted once: a batch overwrites what lies inside of the padding, and leaves that as it is.
        self._padded_NHWC = torch.from_numpy(pad(canvas, feed.padding, feed.fill_C))
        inside = slice(feed.padding, feed.padding + height), slice(feed.padding, feed.padding + width)
        self._inside_NHWC = self._padded_NHWC.numpy()[:, *inside]
        self._windows = windows(self._padded_NHWC, height, width)
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
                if buffer is None or not self._put(_Filled(request, self._fill(request, buffer))):
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

    def _fill(self, request: Request, buffer: Tensor) -> Tensor:
        """Gather, flip and shift into a buffer; the copy to the device is of bytes, a quarter of the floats'."""
        feed, num = self._feed, len(request.index_N)
        out = buffer.numpy()[:num]
        if feed.augment == "none":
            feed.split.gather(request.index_N, out=out)
            return buffer
        images_NHWC = feed.split.gather(request.index_N)
        if request.flip_N.any():
            images_NHWC[request.flip_N] = images_NHWC[request.flip_N][:, :, ::-1]
        self._inside_NHWC[:num] = images_NHWC
        numbers_N = window_numbers(np.arange(num), request.dy_N, request.dx_N, self._padded_NHWC)
        np.copyto(out, gather_windows(self._windows, numbers_N).numpy().reshape(out.shape))
        return buffer


class StreamingLoader(TrainLoader):
    """Overlaps reading, copying and computing; holds a few batches, never the split."""

    def __init__(self, feed: Feed, first_step: int) -> None:
        super().__init__(feed, first_step)
        self._producers: list[_Producer] = []
        self._stream = torch.cuda.Stream(feed.device) if feed.device.type == "cuda" else None

    def close(self) -> None:
        """End background threads."""
        while self._producers:
            self._producers.pop().close()

    def _batches(self, requests: Iterator[Request]) -> Iterator[Batch]:
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
        images_NCHW = self.normalise(copy.images_NHWC, channels_last=self.feed.channels_last)
        request, split = copy.filled.request, self.feed.split
        targets = None if split.targets_NT is None else split.targets_NT[request.index_N]
        labels_N, targets_NT = on_device(split.labels_N[request.index_N], targets, self.feed.device)
        if copy.event is not None:
            copy.event.synchronize()  # of the copy alone, begun a step ago; the buffer may be overwritten now
        producer.give_back(copy.filled.buffer)
        return Batch(images_NCHW, labels_N, targets_NT, request.weight)
