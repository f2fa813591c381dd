"""Progress for people: bars on stderr at a terminal, elsewhere a line of text now and then."""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Advance = Callable[[int, int, str], None]  # takes what is done, the total, and a note

LINE_SECONDS = 10.0  # between two lines of text: a log of an hour gets 360 of them
LINE_SECONDS_BESIDE_A_BAR = 60.0
RECENT_SECONDS = 30.0  # of a rate: a cluster that has lost workers shows it, and one slow moment does not

_hidden: ContextVar[bool] = ContextVar("hidden", default=False)


@contextmanager
def hidden_bars() -> Iterator[None]:
    """Show no bars in the body: several at once would write over each other."""
    token = _hidden.set(True)
    try:
        yield
    finally:
        _hidden.reset(token)


@contextmanager
def progress_bar(title: str) -> Iterator[Advance]:
    """Yield a function that moves a bar; it does nothing if stderr is not a terminal or bars are hidden."""
    if _hidden.get() or not sys.stderr.isatty():
        yield lambda done, total, note: None
        return
    title_column, note_column = TextColumn("[bold]{task.description}"), TextColumn("{task.fields[note]}")
    columns = (title_column, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), note_column)
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task(title, total=None, note="")
        yield lambda done, total, note: progress.update(bar, completed=done, total=total, note=note)


class Pace:
    """Rate of samples, and the remaining time."""

    def __init__(self, line_seconds: float = LINE_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._line_seconds = line_seconds
        self._clock = clock
        self._said = clock()
        self._seen = deque([(clock(), 0)])

    def note(self, done: int) -> float:
        """Take down what is done; returns samples per second of late, 0 while nothing is known."""
        now = self._clock()
        self._seen.append((now, done))
        while self._seen[1][0] <= now - RECENT_SECONDS:  # the last one is of now
            self._seen.popleft()
        then, before = self._seen[0]
        return (done - before) / (now - then) if now > then else 0.0

    def line(self, done: int, total: int, rate: float) -> str | None:
        """Where things stand, when it is time to say so: never for what takes less than one interval."""
        now = self._clock()
        if now - self._said < self._line_seconds or not rate:
            return None
        self._said = now
        remaining = timedelta(seconds=round((total - done) / rate))
        return f"{done:,} of {total:,} samples ({done / total:.0%}), {rate:,.0f} samples/s, {remaining} left"


@contextmanager
def progress_of_samples(title: str, say: Callable[[str], None]) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that takes the samples done and in all, and shows them with their rate and the time left."""
    pace = Pace(LINE_SECONDS_BESIDE_A_BAR if sys.stderr.isatty() else LINE_SECONDS)
    with progress_bar(title) as advance:

        def show(done: int, total: int) -> None:
            rate = pace.note(done)
            advance(done, total, f"{rate:,.0f} samples/s")
            if (line := pace.line(done, total, rate)) is not None:
                say(f"{title}: {line}")

        yield show
