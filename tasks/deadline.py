"""Time limit of a stage. It applies to everything that the stage calls, and is checked where the stage waits.

The caller can also end the work earlier (`stoppable`). No signal enforces the limit: code that waits checks it, and so
ends its ranks, Dask tasks and temporary files in the usual way, in any thread. A call that cannot check it, such as one
of a file system that does not answer, runs in a daemon thread of its own (`within`).
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import NamedTuple, TypeVar

from paceline.tasks.errors import StoppedError, TimeLimitError

T = TypeVar("T")


class _Limit(NamedTuple):
    setting: str
    seconds: float
    at: float  # monotonic time


_limit: ContextVar[_Limit | None] = ContextVar("limit", default=None)
_wish: ContextVar[Callable[[], str | None] | None] = ContextVar("wish", default=None)


@contextmanager
def time_limit(setting: str, seconds: float | None) -> Iterator[None]:
    """Give the body so many seconds."""
    token = _limit.set(None if seconds is None else _Limit(setting, seconds, time.monotonic() + seconds))
    try:
        yield
    finally:
        _limit.reset(token)


@contextmanager
def stoppable(why: Callable[[], str | None]) -> Iterator[None]:
    """Let the caller end the body."""
    token = _wish.set(why)
    try:
        yield
    finally:
        _wish.reset(token)


def seconds_left() -> float | None:
    """Seconds until the limit, at least 0; None where there is none."""
    limit = _limit.get()
    return None if limit is None else max(0.0, limit.at - time.monotonic())


def check() -> None:
    """Raise TimeLimitError if no time is left, and StoppedError if nobody wants the work any more."""
    wish = _wish.get()
    if wish is not None and (reason := wish()) is not None:
        raise StoppedError(reason)
    limit = _limit.get()
    if limit is not None and time.monotonic() >= limit.at:
        raise TimeLimitError(
            f"{limit.setting}={limit.seconds:g}: the stage has not ended within so many seconds and was ended; "
            "finished work stays; raise the limit, or find out what it waited for"
        )


def within(work: Callable[[], T]) -> T:
    """Return the result of `work`; under a limit, wait no longer than that: TimeLimitError if it has not come back."""
    if _limit.get() is None:
        return work()
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001  raised again by the waiting thread
            result.set_exception(error)

    threading.Thread(target=copy_context().run, args=(run,), name="paceline-limited", daemon=True).start()
    while not wait([result], seconds_left()).done:
        check()
    return result.result()
