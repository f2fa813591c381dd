"""Metrics on their way from a rank to the flow."""

import math
import resource
from contextlib import contextmanager

import pytest

from paceline.tasks.metrics_file import FILE, MetricsFile, MetricsReader, attempts

MOST = 100


@pytest.fixture
def attempt(tmp_path):
    """Opens the file of an attempt's first rank."""

    def opened(number):
        directory = tmp_path / f"attempt-{number}" / "rank-0"
        directory.mkdir(parents=True)
        return MetricsFile(directory / FILE)

    return opened


@contextmanager
def disk_of(num_bytes):
    """No file of this process may become larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def told(found):
    return [(name, value, step) for name, value, _, step in found]


def test_what_is_written_is_read_once_and_in_order(attempt, tmp_path):
    reader = MetricsReader(tmp_path)
    assert reader.read(MOST) == []
    file = attempt(0)
    assert reader.read(MOST) == []
    file.log({"loss": 0.1, "rate": 2}, 5)
    assert told(reader.read(1)) == [("loss", 0.1, 5)]
    file.log({"loss": math.inf}, 10)
    ((name, value, step), last) = told(reader.read(MOST))
    assert (name, value, step) == ("rate", 2, 5)
    assert last == ("loss", math.inf, 10)
    assert reader.read(MOST) == []
    file.log({"loss": math.nan}, 15)
    file.close()
    ((_, value, when, _),) = reader.read(MOST)
    assert math.isnan(value)
    assert when > 1.7e12, "milliseconds"


def test_a_line_is_read_when_it_is_whole(attempt, tmp_path):
    attempt(0).close()
    reader, path = MetricsReader(tmp_path), tmp_path / "attempt-0" / "rank-0" / FILE
    found = []
    with path.open("a") as file:
        for part in ('["loss", 0.5, 1', '7, 3]\n["lo', 'ss", 0.4, 18, 4]'):
            file.write(part)
            file.flush()
            found.append(reader.read(MOST))
    assert found == [[], [("loss", 0.5, 17, 3)], []], "the last line has no end: its process has died"


def test_what_a_disk_has_spoilt_is_left_out(attempt, tmp_path):
    file, path = attempt(0), tmp_path / "attempt-0" / "rank-0" / FILE
    file.log({"loss": 1.0}, 1)
    with path.open("ab") as spoilt:
        spoilt.write(b"\0\0\0\n5\n[1, 2]\n" * MOST)
    with path.open("ab") as more:
        more.write(b'["loss", 2.0, 17, 2]\n')
    file.close()
    attempt(1).close()
    reader = MetricsReader(tmp_path)
    assert [step for *_, step in reader.read(MOST)] == [1]
    assert [step for *_, step in reader.read(MOST)] == [2]
    assert reader.read(MOST) == []


def test_a_full_disk_loses_nothing_that_fits_later(attempt, tmp_path):
    file, reader = attempt(0), MetricsReader(tmp_path)
    with disk_of(100):
        for step in range(5):
            file.log({"loss": 1.0}, step)
    seen = reader.read(MOST)
    assert len(seen) < 5, "there was room for two or three lines and a part of one"
    file.log({"loss": 1.0}, 5)
    file.close()
    assert [step for *_, step in seen + reader.read(MOST)] == [0, 1, 2, 3, 4, 5]


def test_attempts_follow_each_other_and_their_samples_are_counted_on(attempt, tmp_path):
    for number, steps in ((0, (1, 2, 3)), (2, (3, 4)), (10, (5,))):
        file = attempt(number)
        for sample, step in enumerate(steps):
            file.log({"loss": float(number)}, step)
            file.log({"system/cpu": float(number)}, sample)
        file.close()
    assert attempts(tmp_path) == [0, 2, 10]
    first, again = MetricsReader(tmp_path), MetricsReader(tmp_path)
    found = [first.read(MOST) for _ in range(4)]
    assert found[3] == []
    assert [told(part)[0][1] for part in found[:3]] == [0.0, 2.0, 10.0], "by number, one attempt at a time"
    every = [metric for part in found for metric in part]
    assert [step for name, _, _, step in every if name == "loss"] == [1, 2, 3, 3, 4, 5]
    assert [step for name, _, _, step in every if name == "system/cpu"] == [0, 1, 2, 3, 4, 5]
    assert [metric for _ in range(3) for metric in again.read(MOST)] == every
    assert told(MetricsReader(tmp_path).read(1)) == told(every[:1])
