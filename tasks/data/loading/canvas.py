"""Gathers a batch from shards, flipped and shifted, in as few passes over its pixels as there can be.

Knows numpy only, so that a background thread may use it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from tasks.data.loading.batch import columns_before_flip, gather_windows, pad, window_numbers, windows
from tasks.data.loading.train_loader import Feed, Request


class Canvas:
    """Room for one padded batch.

    Args:
        feed: what is delivered.
        largest: samples of the largest batch.
    """

    def __init__(self, feed: Feed, largest: int) -> None:
        self._feed = feed
        height, width, channels = feed.split.image_shape
        blank = np.zeros((largest, height, width, channels), dtype=np.uint8)
        self._gathered_NHWC = np.empty_like(blank)
        # Painted once: a batch overwrites what lies inside of the padding, and leaves that as it is.
        self._padded_NHWC = torch.from_numpy(pad(blank, feed.padding, feed.fill_C))
        inside = slice(feed.padding, feed.padding + height), slice(feed.padding, feed.padding + width)
        self._inside_NHWC = self._padded_NHWC.numpy()[:, *inside]
        self._windows = windows(self._padded_NHWC, height, width)
        self._mirrored_F = (np.arange(width)[::-1, np.newaxis] * channels + np.arange(channels)).ravel()
        """The bytes of a row, by pixels from right to left."""

    def batch(self, request: Request, out: npt.NDArray[np.uint8] | None = None) -> npt.NDArray[np.uint8]:
        """The images (N, H, W, C) of a request, in an array of the caller's: the one given, or a new one."""
        feed, num = self._feed, len(request.index_N)
        if feed.augment == "none":
            return feed.split.gather(request.index_N, out=out)
        # In the order of the shards, which is undone by the windows' numbers at no cost.
        order_N = feed.split.gather_by_shard(request.index_N, self._gathered_NHWC[:num])
        self._inside_NHWC[:num] = self._gathered_NHWC[:num]
        place_N = np.empty(num, dtype=np.int64)
        place_N[order_N] = np.arange(num)
        dx_N = columns_before_flip(request.dx_N, request.flip_N, feed.padding)
        numbers_N = window_numbers(place_N, request.dy_N, dx_N, self._padded_NHWC)
        images_NHWC = gather_windows(self._windows, numbers_N).numpy().reshape(num, *feed.split.image_shape)
        rows_NHF = images_NHWC.reshape(num, feed.split.image_shape[0], -1)
        # By `take`, a third of the time of a view with negative strides, which is copied byte by byte.
        rows_NHF[request.flip_N] = np.take(rows_NHF[request.flip_N], self._mirrored_F, axis=2)
        if out is None:
            return images_NHWC
        np.copyto(out, images_NHWC)
        return out
