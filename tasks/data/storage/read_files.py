"""The contents of files below a root, in order: from a disk, S3 or its cache, or any file system of fsspec."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, NamedTuple, TypeVar

from paceline.tasks.data.samples import Samples
from paceline.tasks.data.sources import folder
from paceline.tasks.data.storage import cache, s3
from paceline.tasks.errors import InputError
from paceline.tasks.records.data import Reads

WAVE_FILES = s3.AT_ONCE
WAVE_BYTES = 32 * 2**20
"""Limits of one wave of requests. Two waves are in memory: one is decoded while the other is fetched."""

T = TypeVar("T")

_LOGGER = logging.getLogger(__name__)


class File(NamedTuple):
    """One file, or a part of one, as it was listed."""

    path: str  # below the root
    size: int = 0  # bytes; 0 where that is not known
    stamp: str = ""  # `Sample.stamp`; empty where it is not known
    start: int | None = None  # first byte of a part; None for the complete file

    @property
    def end(self) -> int | None:
        """The byte after the part; None for the complete file."""
        return None if self.start is None else self.start + self.size


@dataclass
class ReadCounter:
    """Counts of remote reads."""

    reads: Reads = field(default_factory=Reads)
    lock: Lock = field(default_factory=Lock)  # a prediction reads in several threads


_TALLY: ContextVar[ReadCounter | None] = ContextVar("_TALLY", default=None)


@contextmanager
def count_reads() -> Iterator[ReadCounter]:
    """Count the remote reads of this thread in the body."""
    tally = ReadCounter()
    token = _TALLY.set(tally)
    try:
        yield tally
    finally:
        _TALLY.reset(token)


def files_of(samples: Samples) -> Iterator[File]:
    """The file of each sample."""
    return map(File, samples.paths, samples.sizes.tolist(), samples.stamps)


def read_files(root: str, files: Iterable[File]) -> Iterator[bytes | OSError]:
    """The content of each file, or the error of this file alone.

    Raises:
        InputError: The root cannot be opened from this process, or a file is not the one that was listed.
        OutsideError: A store broke off again and again.
    """
    filesystem, base = folder.open_root(root)
    if folder.is_local(filesystem):
        return (_read_local(f"{base}/{file.path}", file) for file in files)
    if s3.is_s3(root):
        return _read_s3(_S3Reader(root, filesystem, base), _waves(files))
    return (content for wave in _waves(files) for content in _read_fsspec(filesystem, base, wave))


Wave = list[File]
Contents = Callable[[], Sequence[bytes | OSError]]  # waits for a wave that was requested


def _waves(files: Iterable[File]) -> Iterator[Wave]:
    wave: Wave = []
    num_bytes = 0
    for file in files:
        if wave and (len(wave) == WAVE_FILES or num_bytes + file.size > WAVE_BYTES):
            yield wave
            wave, num_bytes = [], 0
        wave.append(file)
        num_bytes += file.size
    if wave:
        yield wave


def _read_fsspec(filesystem: Any, base: str, wave: Wave) -> list[bytes | OSError]:
    """Read from any file system of fsspec; those that are asynchronous get a wave at once."""
    # Unlike `cat` it takes a path as it is: names may hold * and ?.
    contents: list[bytes | OSError] = filesystem.cat_ranges(
        [folder.below(base, file.path) for file in wave],
        [file.start for file in wave],
        [file.end for file in wave],
        on_error="return",
    )
    for content in contents:
        # A file that is gone is a fact about the data; any other error is the network's, and worth a retry.
        if isinstance(content, Exception) and not isinstance(content, FileNotFoundError):
            raise content
    return contents


def _read_s3(reader: _S3Reader, waves: Iterator[Wave]) -> Iterator[bytes | OSError]:
    """Read one wave while the one before is in use."""
    first = next(waves, None)
    ahead = reader.request(first) if first else None
    try:
        while ahead is not None:
            contents = ahead()
            following = next(waves, None)
            ahead = reader.request(following) if following else None
            yield from contents
    finally:
        reader.close()


class _S3Reader:
    """Objects of S3, from the cache or the store."""

    def __init__(self, root: str, filesystem: Any, base: str) -> None:
        self._root = root
        self._filesystem = filesystem
        self._base = base
        self._endpoint = _name_host(lambda: s3.endpoint_of(root, filesystem))
        self._cache = cache.of_this_host()
        self._on_its_way: Future[list[s3.Fetched]] | None = None

    def request(self, wave: Wave) -> Contents:
        """Request a wave; returns a function that waits for it."""
        objects = [s3.Wanted(folder.below(self._base, file.path), *file[1:]) for file in wave]
        keys = [self._key(item) for item in objects]
        cached = [self._from_cache(key) for key in keys]
        missing = [place for place, content in enumerate(cached) if content is None]
        fetching = asyncio.run_coroutine_threadsafe(
            s3.fetch(self._root, self._filesystem, [objects[place] for place in missing]), self._filesystem.loop
        )
        self._on_its_way = fetching

        def contents() -> list[bytes | OSError]:
            fetched = dict(zip(missing, _name_host(fetching.result), strict=True))
            self._store({keys[place]: result.content for place, result in fetched.items()})
            sizes = [len(result.content) for result in fetched.values() if isinstance(result.content, bytes)]
            num_retries = sum(result.num_sent - 1 for result in fetched.values())
            num_fetched, num_cached = len(fetched), len(cached) - len(missing)
            _count(num_cached=num_cached, num_fetched=num_fetched, num_bytes=sum(sizes), num_retries=num_retries)
            return [fetched[place].content if content is None else content for place, content in enumerate(cached)]

        return contents

    def close(self) -> None:
        """Give up what is on its way."""
        if self._on_its_way is not None:
            self._on_its_way.cancel()

    def _key(self, one: s3.Wanted) -> str:
        """Key in the cache; empty where no ETag identifies the content."""
        facts = one if one.start is not None else one[:-1]
        return cache.key_of(self._endpoint, *facts) if self._cache is not None and one.etag else ""

    def _from_cache(self, key: str) -> bytes | None:
        if self._cache is None or not key:
            return None
        try:
            return self._cache.get(key)
        except cache.DamagedError as error:
            _LOGGER.warning("%s in the cache is damaged; fetching again", error)
            _count(num_damaged=1)
        except OSError as error:
            _LOGGER.warning("cannot read the cache (%s); fetching again", error)
        return None

    def _store(self, contents: dict[str, bytes | OSError]) -> None:
        if self._cache is None:
            return
        try:
            self._cache.put({key: content for key, content in contents.items() if key and isinstance(content, bytes)})
        except OSError as error:  # a help, no more
            _LOGGER.warning("cannot write to the cache (%s); continuing without it", error)
            self._cache = None


def _name_host(ask: Callable[[], T]) -> T:
    """Call a function; add the name of this host to its error, because the reader may look at another host."""
    try:
        return ask()
    except InputError as error:
        raise type(error)(f"{error} (seen from host {socket.gethostname()})") from error


def _count(**counts: int) -> None:
    tally = _TALLY.get()
    if tally is not None:
        with tally.lock:
            tally.reads = Reads.total([tally.reads, Reads(**counts)])


def _read_local(path: str, file: File) -> bytes | OSError:
    try:
        # Half the time of Path.read_bytes, and a small picture is decoded in less than either.
        with open(path, "rb", buffering=0) as stream:  # noqa: PTH123
            if file.start is None:
                return stream.read()
            stream.seek(file.start)
            return stream.read(file.size)
    except OSError as error:
        return error
