"""What a host's C library lets a process keep."""

import pytest

from paceline.tasks import host


@pytest.mark.parametrize(("takes_more", "mapped"), [(True, 4 * 2**30), (False, 32 * 2**20)])
def test_older_libraries_are_not_asked_for_more_than_they_take(monkeypatch, takes_more, mapped):
    monkeypatch.setattr(host, "_takes_more", lambda: takes_more)
    host.keep_memory.cache_clear()
    try:
        assert host.keep_memory()["MALLOC_MMAP_THRESHOLD_"] == str(mapped)
    finally:
        host.keep_memory.cache_clear()


def test_another_c_library_is_no_error(monkeypatch):
    monkeypatch.setattr(host.ctypes, "CDLL", lambda _: object())
    assert host._takes_more() is False
