"""Share of files in the page cache, which are read without the disk. Linux only; None elsewhere."""

import ctypes
import mmap
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

MAX_FILES = 64
MAX_BYTES_PER_FILE = 8 * 2**20
"""With `MAX_FILES` half a gigabyte is looked at, in milliseconds: a window per file, at another place in each."""
GOLDEN = 0.618034
"""Steps of this share of the whole spread the windows evenly over the files' lengths, however many there are."""


def cached_fraction(files: Iterable[str | Path]) -> float | None:
    """Share of the files' bytes in the page cache, from an even sample; None when unknown."""
    paths = [Path(file) for file in files]
    chosen = paths[:: max(1, -(-len(paths) // MAX_FILES))]
    cached = total = 0.0
    for number, path in enumerate(chosen):
        try:
            size = path.stat().st_size
            share = _share_of_window(path, size, (number * GOLDEN) % 1.0) if size else 0.0
        except (OSError, ValueError, AttributeError):  # gone, unreadable, no mincore
            return None
        cached += share * size
        total += size
    return cached / total if total else None


def _share_of_window(path: Path, size: int, place: float) -> float:
    """Share of resident pages in one window of the file.

    Raises:
        OSError: They are unknown. Linux (from 5.2 on) calls every page resident for a caller who neither owns the
            file nor may write to it, so that nobody learns what others read.
    """
    if sys.platform != "linux" or not (path.stat().st_uid == os.geteuid() or os.access(path, os.W_OK)):
        raise OSError(f"the pages of {path} are unknown")
    length = min(size, MAX_BYTES_PER_FILE)
    start = int((size - length) * place) // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    flags = np.zeros(-(-length // mmap.PAGESIZE), dtype=np.uint8)
    with path.open("rb") as file, mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ, offset=start) as mapped:
        window = np.frombuffer(mapped, dtype=np.uint8)
        library = ctypes.CDLL(None, use_errno=True)
        failed = library.mincore(
            ctypes.c_void_p(window.ctypes.data), ctypes.c_size_t(length), ctypes.c_void_p(flags.ctypes.data)
        )
        del window  # a mapping with a view on it cannot be closed
    if failed:
        raise OSError(ctypes.get_errno(), "mincore", str(path))
    return float(np.mean(flags & 1))
