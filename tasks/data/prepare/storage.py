"""Chooses how prepared images are stored: as pixels, or as JPEG where these are many and decoding is fast enough."""

import time
from pathlib import Path

import numpy as np
import psutil
import simplejpeg

from paceline.conf.data import Data
from paceline.tasks.cluster.hardware import usable_cores
from paceline.tasks.data.key import preparation_key
from paceline.tasks.data.listing import SampleListing
from paceline.tasks.data.prepare import store
from paceline.tasks.data.prepare.chunks import image_bytes
from paceline.tasks.data.prepare.photographs import COLOUR_SPACES, encode
from paceline.tasks.errors import InputError
from paceline.tasks.records.record import Choice

MEMORY_SHARE = 0.25  # of a host's memory, which keeps a set of pixels that is read in each epoch
LEAST_DECODED = 1_000.0  # images/s of a host; below, decoding would hold up the training of small networks on its CPU
MEASURED_SECONDS = 0.1


def choose_storage(listing: SampleListing, data: Data, home: Path) -> Choice:
    """The value of `data.storage` and the reason; InputError if they cannot be stored as the settings say."""
    unfit = _unfit(listing, data)
    for setting, is_used in (("storage=jpeg", data.storage == "jpeg"), ("stored_size", data.keeps_aspect)):
        if is_used and unfit:
            fault = f"data.{setting} cannot be used with data.source={data.source}: {unfit}"
            raise InputError(f"{fault}; use data.storage=raw, and remove data.stored_size")
    if data.storage != "auto":
        return Choice(value=data.storage, reason="set by data.storage")
    if unfit:
        return Choice(value="raw", reason=unfit)
    raw, jpeg = (data.model_copy(update={"storage": name}) for name in ("raw", "jpeg"))
    for prepared in (raw, jpeg):
        if store.directory_of(home, preparation_key(listing, prepared)).exists():
            return Choice(value=prepared.storage, reason="the set is prepared")
    num_bytes, memory = listing.num_samples * image_bytes(raw, listing.channels), psutil.virtual_memory().total
    sizes = f"{num_bytes / 2**30:,.1f} GiB of pixels for {memory / 2**30:,.0f} GiB of memory"
    if num_bytes <= MEMORY_SHARE * memory:
        return Choice(value="raw", reason=f"{sizes}: they stay there from epoch to epoch")
    rate = decode_rate(data.stored_side, listing.channels, data.jpeg_quality) * usable_cores()
    decoding = f"{usable_cores()} cores decode {rate:,.0f} images/s here"
    if rate < LEAST_DECODED:
        return Choice(value="raw", reason=f"{sizes}, but {decoding}, below {LEAST_DECODED:,.0f}")
    return Choice(value="jpeg", reason=f"{sizes}, and {decoding}")


def _unfit(listing: SampleListing, data: Data) -> str:
    """Why samples must be stored as squares of pixels; empty if they need not."""
    if listing.num_planes or listing.target_names or listing.origin.num_frames or listing.origin.signal is not None:
        return "encoding and crops change masks, angles, signals and clips"
    if listing.channels not in COLOUR_SPACES:
        return f"JPEG has 1 or 3 channels, and its images {listing.channels}"
    return "" if data.allows_jpeg else "its samples are not images alone"


def decode_rate(side: int, channels: int, quality: int) -> float:
    """Photographs (side, 4/3 side) that one core decodes in a second, measured on a generated one."""
    places = np.add.outer(np.arange(side), np.arange(side * 4 // 3))
    detail = np.random.default_rng(1).normal(0, 12, (*places.shape, channels))
    pixels = (128 + 80 * np.sin(places / 17)[..., np.newaxis] + detail).clip(0, 255).astype(np.uint8)
    encoded, number, started = encode(pixels, quality), 0, time.perf_counter()
    while (seconds := time.perf_counter() - started) < MEASURED_SECONDS or not number:
        simplejpeg.decode_jpeg(encoded, COLOUR_SPACES[channels])
        number += 1
    return number / seconds
