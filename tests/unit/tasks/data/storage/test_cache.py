"""The cache of a host: what is put there comes back or is not there, and its processes stay under one limit."""

from __future__ import annotations

import fcntl
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from paceline.tasks.data.storage import cache
from paceline.tasks.data.storage.cache import LOCK, Cache, DamagedError, key_of
from paceline.tasks.errors import RunError
from tests.support.refusals import refused

ENTRY = 1_000
NUM_PROCESSES, NUM_PUTS = 3, 60


def entries(directory: Path) -> list[Path]:
    return [path for path in directory.glob("??/*") if path.is_file()]


def size(directory: Path) -> int:
    return sum(path.stat().st_size for path in entries(directory))


def filled(directory: Path, names: range, limit: int = 10 * ENTRY) -> Cache:
    kept = Cache(directory, limit)
    for name in names:
        kept.put({key_of(name): content_of(name)})
        for path in entries(directory):
            if path.stat().st_mtime > 1_000_000:  # the clock of a file system is too coarse to tell them apart
                os.utime(path, (name, name))
    return kept


def content_of(name: int) -> bytes:
    return bytes([name % 256]) * (ENTRY - cache.DIGEST_BYTES)


def test_what_is_put_comes_back(tmp_path: Path) -> None:
    kept = Cache(tmp_path, 10**6)
    assert kept.get(key_of("a")) is None
    kept.put({key_of("a"): b"first", key_of("b"): b""})
    assert (kept.get(key_of("a")), kept.get(key_of("b"))) == (b"first", b"")
    assert Cache(tmp_path, 10**6).get(key_of("a")) == b"first"
    assert key_of("http://x", "b/k", 3, '"e"') != key_of("http://x", "b/k", 3, '"f"')


@pytest.mark.parametrize("damage", ["altered", "torn", "empty", "longer"])
def test_a_damaged_entry_is_noticed_and_gone(tmp_path: Path, damage: str) -> None:
    kept = Cache(tmp_path, 10**6)
    kept.put({key_of("a"): b"content"})
    (path,) = entries(tmp_path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(
        {"altered": content, "torn": content[:35], "empty": b"", "longer": path.read_bytes() + b"x"}[damage]
    )
    with pytest.raises(DamagedError, match=str(path)):
        kept.get(key_of("a"))
    assert kept.get(key_of("a")) is None
    kept.put({key_of("a"): b"content"})
    assert kept.get(key_of("a")) == b"content"


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    kept = filled(tmp_path, range(10))
    assert size(tmp_path) == 10 * ENTRY
    assert kept.get(key_of(0)) is not None
    kept.put({key_of("new"): content_of(99)})
    assert size(tmp_path) <= 10 * ENTRY
    assert kept.get(key_of(0)) is not None, "used a moment ago"
    assert kept.get(key_of("new")) is not None
    assert kept.get(key_of(1)) is None
    assert kept.get(key_of(9)) is not None


def test_what_is_larger_than_the_cache_is_not_kept_and_drives_nothing_out(tmp_path: Path) -> None:
    kept = filled(tmp_path, range(5))
    kept.put({key_of("huge"): b"x" * 20 * ENTRY})
    assert kept.get(key_of("huge")) is None
    assert size(tmp_path) == 5 * ENTRY


@pytest.mark.parametrize("damage", [None, "", "many", "-5"])
def test_it_counts_again_where_nobody_knows_what_is_in_use(tmp_path: Path, damage: str | None) -> None:
    kept = filled(tmp_path, range(10))
    used = tmp_path / cache.USED
    used.unlink() if damage is None else used.write_text(damage)
    kept.put({key_of("new"): content_of(99)})
    assert size(tmp_path) <= 10 * ENTRY


def test_temporary_files_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    kept = filled(tmp_path, range(10))
    old, new = (entries(tmp_path)[0].with_name(f"{name}.tmp") for name in ("old", "new"))
    old.write_bytes(b"x")
    new.write_bytes(b"x")
    os.utime(old, (1, 1))
    kept.put({key_of("more"): content_of(99)})
    assert new.exists()
    assert not old.exists()


def _put_many(directory: str, first: int) -> int:
    """The largest size that the directory had meanwhile."""
    kept, largest = Cache(Path(directory), 40 * ENTRY), 0
    for name in range(first, first + NUM_PUTS):
        kept.put({key_of(name): content_of(name)})
        found = kept.get(key_of(name))
        assert found in (None, content_of(name))
        with (Path(directory) / LOCK).open("ab") as lock:  # else one that goes and one that comes may both be counted
            fcntl.flock(lock, fcntl.LOCK_EX)
            largest = max(largest, size(Path(directory)))
    return largest


def test_several_processes_stay_under_one_limit(tmp_path: Path) -> None:
    with ProcessPoolExecutor(NUM_PROCESSES, get_context("forkserver")) as pool:
        found = [pool.submit(_put_many, str(tmp_path), number * 1_000) for number in range(NUM_PROCESSES)]
        assert max(one.result() for one in found) <= 40 * ENTRY
    assert 20 * ENTRY < size(tmp_path) <= 40 * ENTRY


@pytest.mark.parametrize("given", ["much", "-1", "nan", "inf", "1e9"])
def test_what_is_no_size_is_refused(given: str) -> None:
    with refused("PACELINE_CACHE_GIB", f"PACELINE_CACHE_GIB={given}"):
        cache.limit_of(given)


def test_the_environment_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PACELINE_CACHE_GIB", "0")
    assert cache.of_this_host() is None
    monkeypatch.setenv("PACELINE_CACHE_GIB", "0.5")
    assert cache.limit_of("0.5") == 2**29
    kept = cache.of_this_host()
    assert kept is not None
    kept.put({key_of("a"): b"x"})
    (own,) = (tmp_path / "cache").iterdir()
    assert own.stat().st_mode & 0o777 == 0o700, "copies of what a password protects"
    own.chmod(0o777)
    cache._open_cache.cache_clear()
    with refused(None, "PACELINE_HOME", kind=RunError):
        cache.of_this_host()
