"""The contents of files below a root, in order: from a disk, S3 or its cache, or any file system of fsspec."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import chain
from threading import Lock
from typing import Any, NamedTuple, TypeVar

from paceline.tasks.data.samples import File, Samples
from paceline.tasks.data.sources import folder
from paceline.tasks.data.storage import cache, s3
from paceline.tasks.errors import InputError
from paceline.tasks.records.data import Reads

WAVE_FILES = s3.AT_ONCE
WAVE_BYTES = 32 * 2**20
"""Limits of one wave of requests. Two waves are in memory: one is decoded while the other is fetched."""

T = TypeVar("T")

_LOGGER = logging.getLogger(__name__)


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

    InputError if the root cannot be opened from this process, or a file is not the one that was listed; OutsideError if
    a store broke off again and again.
    """
    filesystem, base = folder.open_root(root)
    if folder.is_local(filesystem):
        return (_read_local(f"{base}/{file.path}", file) for file in files)
    if s3.is_s3(root):
        return _S3Reader(root, filesystem, base).read(_waves(files))
    return (content for wave in _waves(files) for content in _read_fsspec(filesystem, base, wave))


Wave = list[File]


class _Requested(NamedTuple):
    """A wave that was requested."""

    keys: Sequence[str]  # in the cache
    cached: Sequence[bytes | None]  # None for what is fetched
    fetching: Future[list[s3.Fetched]]


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
        [None if file.start is None else file.start + file.size for file in wave],
        on_error="return",
    )
    for content in contents:
        # A file that is gone is a fact about the data; any other error is the network's, and worth a retry.
        if isinstance(content, Exception) and not isinstance(content, FileNotFoundError):
            raise content
    return contents


class _S3Reader:
    """Objects of S3, from the cache or the store; one wave is fetched while the one before is in use."""

    def __init__(self, root: str, filesystem: Any, base: str) -> None:
        self._root = root
        self._filesystem = filesystem
        self._base = base
        self._endpoint = _name_host(lambda: s3.endpoint_of(root, filesystem))
        self._cache = cache.of_this_host()

    def read(self, waves: Iterator[Wave]) -> Iterator[bytes | OSError]:
        ahead: _Requested | None = None
        try:
            for wave in chain(waves, [None]):
                contents = self._receive(ahead) if ahead else []
                ahead = self._request(wave) if wave else None
                yield from contents
        finally:
            if ahead:
                ahead.fetching.cancel()

    def _request(self, wave: Wave) -> _Requested:
        objects = [file._replace(path=folder.below(self._base, file.path)) for file in wave]
        keys, cached = zip(*map(self._from_cache, objects), strict=True)
        missing = [item for item, content in zip(objects, cached, strict=True) if content is None]
        fetching = s3.fetch(self._root, self._filesystem, missing)
        return _Requested(keys, cached, asyncio.run_coroutine_threadsafe(fetching, self._filesystem.loop))

    def _receive(self, requested: _Requested) -> list[bytes | OSError]:
        keys, cached = requested.keys, requested.cached
        fetched = _name_host(requested.fetching.result)
        answers = iter(fetched)
        contents = [next(answers)[0] if content is None else content for content in cached]
        missing = [key for key, content in zip(keys, cached, strict=True) if content is None]
        new = {key: content for key, (content, _) in zip(missing, fetched, strict=True) if isinstance(content, bytes)}
        new.pop("", None)
        if self._cache is not None:
            try:
                self._cache.put(new)
            except OSError as error:  # a help, no more
                _LOGGER.warning("cannot write to the cache (%s); continuing without it", error)
                self._cache = None
        num_bytes = sum(len(content) for content, _ in fetched if isinstance(content, bytes))
        num_fetched, num_retries = len(fetched), sum(num_sent - 1 for _, num_sent in fetched)
        num_cached = len(cached) - num_fetched
        _count(num_cached=num_cached, num_fetched=num_fetched, num_bytes=num_bytes, num_retries=num_retries)
        return contents

    def _from_cache(self, file: File) -> tuple[str, bytes | None]:
        """An object's key in the cache, empty where no ETag identifies the content; and the content if it is there."""
        if self._cache is None or not file.stamp:
            return "", None
        key = cache.key_of(self._endpoint, *(file if file.start is not None else file[:-1]))
        try:
            return key, self._cache.get(key)
        except cache.DamagedError as error:
            _LOGGER.warning("%s in the cache is damaged; fetching again", error)
            _count(num_damaged=1)
        except OSError as error:
            _LOGGER.warning("cannot read the cache (%s); fetching again", error)
        return key, None


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
    except MemoryError:
        return OSError(errno.ENOMEM, "its content is larger than the free memory")
