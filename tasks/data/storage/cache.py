"""A bounded cache of remote files on a disk of this host, for all processes of one user.

An entry is a file with the digest of its content before it. A damaged entry is removed and counts as
missing. A key covers all that the content depends on, so no entry becomes stale.
"""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from paceline.conf.environment import Environment
from paceline.tasks.errors import InputError
from paceline.tasks.files import TEMPORARY_SUFFIX, private_directory, write_pieces

DIGEST_BYTES = 32
KEPT_FRACTION = 0.9  # of the limit, after eviction, which scans the complete directory and should be rare
FORGOTTEN_SECONDS = 3600.0  # age at which a temporary file is abandoned
DEFAULT_GIB, MAX_GIB = 8.0, 1_000_000
USED, LOCK = "used", "lock"


def key_of(*facts: object) -> str:
    """64 hex digits over what a content depends on."""
    return hashlib.sha256(repr(facts).encode(errors="surrogateescape")).hexdigest()


@dataclass(frozen=True)
class Cache:
    """Contents by their keys, at most so many bytes (`_limit`) of all processes together.

    The bytes in use are recorded in a file under a lock, so that the directory is looked through only when it is full.
    """

    _directory: Path
    _limit: int

    def get(self, key: str) -> bytes | None:
        """Return a content, or None. A damaged entry is removed and raises a DamagedError."""
        path = self._path(key)
        try:
            entry = path.read_bytes()
        except FileNotFoundError:
            return None
        content = entry[DIGEST_BYTES:]
        if entry[:DIGEST_BYTES] != hashlib.sha256(content).digest():
            path.unlink(missing_ok=True)
            raise DamagedError(str(path))
        with suppress(FileNotFoundError):  # evicted by another process in between
            os.utime(path)  # the least recently used goes first
        return content

    def put(self, contents: Mapping[str, bytes]) -> None:
        """Store contents, and evict the least recently used where room is missing; skip contents that are too large."""
        needed = sum(DIGEST_BYTES + len(content) for content in contents.values())
        if not contents or needed > self._limit * KEPT_FRACTION:
            return
        with (self._directory / LOCK).open("ab") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            try:  # bytes in use, or more where two processes have put the same
                used = int((self._directory / USED).read_text())
            except (FileNotFoundError, ValueError):
                used = -1
            if used < 0 or used + needed > self._limit:
                used = self._make_room(int(self._limit * KEPT_FRACTION) - needed)
            (self._directory / USED).write_text(str(used + needed))
            # Still under the lock: a process that makes room must see every entry.
            for key, content in contents.items():
                self._path(key).parent.mkdir(exist_ok=True)
                # Not pushed to the disk: what a crash of the host leaves of it has another digest.
                write_pieces(self._path(key), (hashlib.sha256(content).digest(), content), durably=False)

    def _path(self, key: str) -> Path:
        return self._directory / key[:2] / key[2:]

    def _make_room(self, most: int) -> int:
        entries = []
        for folder in [entry.path for entry in os.scandir(self._directory) if entry.is_dir(follow_symlinks=False)]:
            for entry in os.scandir(folder):
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    forgotten = time.time() - status.st_mtime > FORGOTTEN_SECONDS
                    if entry.name.endswith(TEMPORARY_SUFFIX) and forgotten:
                        Path(entry.path).unlink(missing_ok=True)
                    else:
                        entries.append((status.st_mtime, status.st_size, entry.path))
        used = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if used <= most:
                break
            Path(path).unlink(missing_ok=True)
            used -= size
        return used


class DamagedError(Exception):
    """An entry is not what was put there; the message is its path."""


def of_this_host() -> Cache | None:
    """This host's cache; None for size 0. InputError if that is no number, RunError if its directory is not safe."""
    site = Environment()
    limit = limit_of(site.cache_gib_given)
    return _open_cache(site.cache_directory, limit) if limit else None


@cache
def _open_cache(directory: Path, limit: int) -> Cache:
    return Cache(private_directory(directory, "what was fetched"), limit)


def recall(key: str) -> Any:
    """A value of JSON from the cache of this host; None where it has none. Errors as in `of_this_host`."""
    stored = of_this_host()
    with suppress(OSError, DamagedError):
        content = stored.get(key) if stored else None
        return None if content is None else json.loads(content)
    return None


def remember(key: str, value: object) -> None:
    """Store a value as JSON in the cache of this host, if that can be written."""
    stored = of_this_host()
    with suppress(OSError):
        if stored:
            stored.put({key: json.dumps(value).encode()})


def limit_of(given: str | None) -> int:
    """Size limit of the cache, bytes; 0 for no cache; an InputError if it is not a number of GiB."""
    try:
        gib = float(given or DEFAULT_GIB)
        if not 0 <= gib < MAX_GIB:
            raise ValueError(given)
    except ValueError as error:
        fix = f"give a number from 0 (no cache) to {MAX_GIB:,}"
        raise InputError(f"PACELINE_CACHE_GIB={given} is not a size in GiB; {fix}") from error
    return int(gib * 2**30)
