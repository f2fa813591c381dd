"""Progress as text: rate and time left, and never more lines than can be read."""

from __future__ import annotations

from paceline.tasks.progress import LINE_SECONDS, Pace, progress_of_samples


class Clock:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_line_names_rate_and_time_left() -> None:
    clock = Clock()
    pace = Pace(clock=clock)
    clock.now = 20.0
    rate = pace.note(200_000)
    assert rate == 10_000
    line = pace.line(200_000, 1_000_000, rate)
    assert line == "200,000 of 1,000,000 samples (20%), 10,000 samples/s, 0:01:20 left"
    clock.now = 20.0 + LINE_SECONDS - 0.1
    assert pace.line(210_000, 1_000_000, pace.note(210_000)) is None
    clock.now = 20.0 + LINE_SECONDS
    assert pace.line(220_000, 1_000_000, pace.note(220_000)) is not None


def test_what_is_quick_says_nothing() -> None:
    clock = Clock()
    pace = Pace(clock=clock)
    for second in range(9):
        clock.now = second
        assert pace.line(second, 10, pace.note(second)) is None


def test_the_rate_is_that_of_late() -> None:
    clock = Clock()
    pace = Pace(clock=clock)
    rates = []
    for second in range(1, 201):
        clock.now = second
        rates.append(pace.note(second * 1_000 if second <= 100 else 100_000 + (second - 100) * 10))
    assert rates[99] == 1_000
    assert rates[-1] == 10


def test_nothing_is_known_before_time_passes() -> None:
    pace = Pace(clock=Clock())
    assert pace.note(5) == 0.0
    assert pace.line(5, 10, 0.0) is None


def test_short_work_leaves_a_log_alone() -> None:
    said: list[str] = []
    with progress_of_samples("prepare", said.append) as show:
        for done in range(1_000):
            show(done, 1_000)
    assert said == []
