"""What a host's C library lets a process keep."""

import subprocess
import sys

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


@pytest.mark.parametrize(("command", "is_whole"), [("exec", False), ("", True)])
def test_the_time_of_a_script_before_a_program_is_left_out(command, is_whole):
    code = (
        "import time; from paceline.tasks import host; host.SCRIPT_SECONDS = 1.0; "
        "start = host.find_program_start(time.clock_gettime(time.CLOCK_BOOTTIME), time.process_time()); "
        "print(start == host.process_start())"
    )
    script = f"sleep 2; {command} {sys.executable} -c '{code}'; true"
    said = subprocess.run(["sh", "-c", script], check=True, capture_output=True, text=True).stdout
    assert said.strip() == str(is_whole)
