"""Prepared sets on disk: find, publish, verify, set aside, clean up.

A set lies in `<home>/prepared/<first 16 digits of its key>/` and appears there complete or not at all. The finished
shards of a preparation that failed are left for the next one of the same key.
"""

import json
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from uuid import uuid4

import psutil

from paceline.tasks.data.listing import SPLITS
from paceline.tasks.data.prepare import manifest
from paceline.tasks.data.prepare.manifest import MANIFEST, REJECTED, DamagedError, M, Manifest, SetManifest
from paceline.tasks.data.prepare.shard import Rejected, ShardRecord
from paceline.tasks.errors import RunError
from paceline.tasks.files import TEMPORARY_SUFFIX, hold, sha256_of, sync_directory, write_durably, write_pieces
from paceline.tasks.host import host_identity
from paceline.tasks.records.data import PreparedSet

OWNER = "owner.json"
FINISHED = "finished.jsonl"  # in the directory of an unfinished set: what is finished of it, one line for each shard
STALE_SECONDS = 24 * 3600.0
LEFT_SECONDS = 7 * STALE_SECONDS  # lifetime of an unfinished set

logger = logging.getLogger(__name__)


def directory_of(home: Path, key: str) -> Path:
    """Where the set with a key lies, or would lie."""
    return home / "prepared" / key[:16]


def find(home: Path, key: str, *, check_content: bool = False) -> PreparedSet | None:
    """The set of images with a key; see `find_as`."""
    started = time.perf_counter()
    facts = find_as(home, key, Manifest, check_content=check_content)
    if facts is None:
        return None
    return facts.to_prepared_set(directory_of(home, key), reused=True, seconds=time.perf_counter() - started)


def find_as(home: Path, key: str, kind: type[M], *, check_content: bool = False) -> M | None:
    """The set with a key, which this process then holds; None without one, or if it is damaged: then it is set aside.

    Files must have their recorded sizes; with `check_content` also their sha256 sums, for which all of them are read.
    """
    path = directory_of(home, key)
    hold(path / MANIFEST)
    if not path.exists():
        return None
    try:
        facts = manifest.read_as(path, kind)
        if facts.key != key:
            raise DamagedError(f"{MANIFEST} has key {facts.key[:24]}..., expected is {key[:24]}...")
        if check_content and (problems := verify(path, kind)):
            raise DamagedError(problems[0])
    except DamagedError as error:
        aside = path.with_name(f".damaged-{path.name}-{uuid4().hex[:8]}")
        with suppress(FileNotFoundError):  # another process was faster
            path.rename(aside)
            logger.warning("Prepared set %s is damaged (%s); moved it to %s, preparing again", path, error, aside.name)
        return None
    return facts


def verify(path: Path, kind: type[SetManifest] = Manifest) -> tuple[str, ...]:
    """Every difference between a set and its manifest, sha256 sums included; empty for a sound set."""
    try:
        facts = manifest.read_as(path, kind)
    except DamagedError as error:
        return (str(error),)
    return tuple(
        f"{file.name} has sha256 {digest[:16]}..., recorded is {file.sha256[:16]}..."
        for file in facts.files
        if (digest := sha256_of(path / file.name)) != file.sha256
    )


@contextmanager
def temporary(home: Path, key: str, folders: Iterable[str] = SPLITS) -> Iterator[Path]:
    """A directory for a set, with what an earlier preparation left; gone afterwards if neither published nor left."""
    path = home / "prepared" / f".tmp-{key[:16]}-{os.getpid()}-{uuid4().hex}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):  # there is none, or another process was faster
        _unfinished_path(home, key).rename(path)
    for folder in folders:
        (path / folder).mkdir(parents=True, exist_ok=True)
    owner = {"host": host_identity(), "pid": os.getpid(), "created": psutil.Process().create_time()}
    (path / OWNER).write_text(json.dumps(owner))
    try:
        yield path
    finally:
        _remove(path)


def _unfinished_path(home: Path, key: str) -> Path:
    return home / "prepared" / f".unfinished-{key[:16]}"


def leave_to_next(home: Path, key: str, directory: Path, finished: Iterable[str]) -> None:
    """Leave a temporary set to the next preparation of the same key, with a line for each finished shard."""
    unfinished = _unfinished_path(home, key)
    with suppress(OSError):  # only an optimisation; the caller raises the error that ended the preparation
        write_pieces(directory / FINISHED, (f"{line}\n".encode() for line in finished))
        _remove(unfinished)
        directory.rename(unfinished)
        _remove_parts(unfinished)  # a worker that was writing finds its place gone, and its part stays


def _remove_parts(directory: Path) -> None:
    """Remove what workers that were lost had not finished: files of shards, and folders of partitions."""
    for part in directory.glob(f"*/*{TEMPORARY_SUFFIX}"):
        if part.is_dir():
            _remove(part)
        else:
            part.unlink(missing_ok=True)


def read_finished_lines(directory: Path) -> list[str]:
    """Records of finished shards that an earlier preparation left in a temporary set."""
    path = directory / FINISHED
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def touch(path: Path) -> None:
    """Mark a temporary directory as in use."""
    os.utime(path / OWNER)


def remove_stale(home: Path) -> int:
    """Remove what `find_stale` finds; returns how many."""
    stale = find_stale(home)
    for path in stale:
        _remove(path)
    return len(stale)


def find_stale(home: Path) -> list[Path]:
    """Temporary directories whose owner is dead, and unfinished sets that are old."""
    prepared = home / "prepared"
    stale = [path for path in prepared.glob(".tmp-*") if _is_stale(path)]
    return stale + [path for path in prepared.glob(".unfinished-*") if _age_seconds(path) > LEFT_SECONDS]


def _is_stale(path: Path) -> bool:
    try:
        if time.time() - (path / OWNER).stat().st_mtime > STALE_SECONDS:
            return True
        owner = json.loads((path / OWNER).read_text())
        if owner["host"] != host_identity():
            return False
        # A pid is used again; together with its start it is not.
        return bool(abs(psutil.Process(owner["pid"]).create_time() - owner["created"]) > 1.0)
    except psutil.NoSuchProcess:
        return True
    except (OSError, ValueError, KeyError):
        return _age_seconds(path) > STALE_SECONDS


def _age_seconds(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _remove(path: Path) -> None:
    # A worker may still be writing its last shard into the tree; it makes no directories, so this ends.
    for _ in range(50):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
        time.sleep(0.1)


def publish(home: Path, directory: Path, facts: SetManifest, rejected: Iterable[bytes]) -> Path:
    """Give a complete temporary set its name, or use the set of a process that was faster; returns its path.

    Raises RunError: a file cannot be seen here.
    """
    for name in (file.name for file in facts.files):
        if not (directory / name).is_file():
            raise RunError(
                f"{directory / name} was written by a worker but cannot be seen here; all hosts need one "
                "PACELINE_HOME; put it on a file system that every host mounts under the same path"
            )
    _remove_parts(directory)  # of a worker that was killed and its task retried
    write_pieces(directory / REJECTED, rejected)
    (directory / OWNER).unlink()
    (directory / FINISHED).unlink(missing_ok=True)
    write_durably(directory / MANIFEST, facts.model_dump_json(indent=1).encode())
    hold(directory / MANIFEST)  # before others can see it
    for folder in (*filter(Path.is_dir, directory.iterdir()), directory):
        sync_directory(folder)
    final = directory_of(home, facts.key)
    try:
        directory.rename(final)
    except OSError:
        # A directory never replaces one that is not empty; anything else is a real error.
        if find_as(home, facts.key, type(facts)) is None:
            raise
    sync_directory(final.parent)
    return final


def write_rejected_list(home: Path, key: str, rejected: Iterable[bytes]) -> Path:
    """Write the list (lines of JSON) of a preparation that stopped because of too many rejected samples."""
    path = home / "rejected" / f"{key[:16]}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_pieces(path, rejected)
    return path


class RejectedSpool:
    """A spool on disk: takes what shards reject, and returns it in the order of the shards, as lines of JSON."""

    def __init__(self, directory: Path) -> None:
        self._stream = TemporaryFile(dir=directory)  # noqa: SIM115 - closed in close
        self._pieces: dict[tuple[int, int], tuple[int, int]] = {}  # by split and shard: its first byte, its length
        self.num_rejected = 0

    def close(self) -> None:
        """Remove the file."""
        self._stream.close()

    def take_rejected(self, record: ShardRecord) -> ShardRecord:
        """Store the rejected samples of a shard; returns its record without them."""
        lines = "".join(f"{entry.model_dump_json()}\n" for entry in record.rejected).encode()
        start = self._stream.seek(0, os.SEEK_END)
        self._stream.write(lines)
        self._pieces[SPLITS.index(record.split), record.number] = start, len(lines)
        self.num_rejected += len(record.rejected)
        return record.model_copy(update={"rejected": ()})

    def _read(self, place: tuple[int, int]) -> bytes:
        start, num_bytes = self._pieces[place]
        self._stream.seek(start)
        return self._stream.read(num_bytes)

    def pieces(self) -> Iterator[bytes]:
        """All lines, those of one shard at a time."""
        return map(self._read, sorted(self._pieces))

    def restore(self, record: ShardRecord) -> ShardRecord:
        """A record with what its shard rejects."""
        lines = self._read((SPLITS.index(record.split), record.number)).splitlines()
        return record.model_copy(update={"rejected": tuple(map(Rejected.model_validate_json, lines))})
