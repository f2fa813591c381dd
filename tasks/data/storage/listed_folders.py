"""Listings of local folders from an earlier run, valid while the times of the folders stay.

The time of a folder changes when a name is added, removed or replaced in it. It does not change when the content of a
file is overwritten in place, which is why `data.trust_directory_times` has to be set.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from paceline.tasks.data.samples import Sample
from paceline.tasks.data.storage import cache

LISTING_VERSION = 1
SETTLED_SECONDS = 2.0
"""Age of a folder from which its time is trusted: a later change within the same tick of a file system's clock (2 s on
FAT, less elsewhere) leaves the time as it is."""


class Listed(NamedTuple):
    """What lies below a folder, as `folder.Tree` has it."""

    files: list[Sample]
    folders: list[str]
    ignored: dict[str, int]
    real_folders: list[str]  # without links


class ListedFolders:
    """The listing of a folder in the cache of this host."""

    def __init__(self, base: str, suffixes: Iterable[str], top: str) -> None:
        self._cache = cache.of_this_host()
        self._key = cache.key_of("folders", LISTING_VERSION, os.path.realpath(base), base, sorted(suffixes), top)
        self._started = time.time()

    def read(self) -> Listed | None:
        """The listing if the time of each folder is that of then, else None."""
        with suppress(OSError, cache.DamagedError):
            content = self._cache.get(self._key) if self._cache else None
            if content is not None:
                times, files, folders, ignored = json.loads(content)
                if all(Path(folder).stat().st_mtime_ns == stamp for folder, stamp in times.items()):
                    return Listed([Sample(*file) for file in files], folders, ignored, sorted(times))
        return None

    def write(
        self, files: Iterable[Sample], folders: Iterable[str], ignored: Mapping[str, int], real_folders: Iterable[str]
    ) -> None:
        """Store a listing, unless a folder changed a moment ago."""
        with suppress(OSError):
            times = {folder: Path(folder).stat().st_mtime_ns for folder in real_folders}
            if self._cache and max(times.values()) < (self._started - SETTLED_SECONDS) * 1e9:
                content = json.dumps([times, list(files), list(folders), ignored])
                self._cache.put({self._key: content.encode()})
