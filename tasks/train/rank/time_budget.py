"""Time budget of a process: at any moment exactly one item's clock runs, so the items add up to the total."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Accounts every second to exactly one item, from `started_at` by `time.monotonic()`, perhaps before it existed."""

    def __init__(self, first: str, started_at: float | None = None) -> None:
        self._since = time.monotonic() if started_at is None else started_at
        self._current = first
        self._seconds: dict[str, float] = defaultdict(float)

    def switch(self, item: str) -> str:
        """Stop the running clock, start that of `item`, and return the name of the one that was stopped."""
        now = time.monotonic()
        self._seconds[self._current] += now - self._since
        self._since = now
        previous, self._current = self._current, item
        return previous

    def relabel(self, item: str) -> None:
        """Account the time since the last switch to `item`."""
        self._current = item

    @contextmanager
    def during(self, item: str) -> Iterator[None]:
        """Account the body to `item`, then switch back."""
        previous = self.switch(item)
        try:
            yield
        finally:
            self.switch(previous)

    def seconds_without(self, item: str) -> float:
        """Seconds since the start, without those of `item`."""
        items = self.budget()
        return sum(items.values()) - items.get(item, 0.0)

    def budget(self) -> dict[str, float]:
        """Seconds per item up to now; they add up to the time since the start."""
        self.switch(self._current)
        return dict(self._seconds)
