"""Ctrl-C and SIGTERM: exceptions that let all be put away, and remembered should a library turn one into another."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_received: list[int] = []
_held: list[list[int]] = []
"""For each `held` that is entered, outermost first: the signal that waits for its end, if there is one."""


class Terminated(SystemExit):
    """SIGTERM has come."""


def listen() -> None:
    """From now on, SIGTERM raises `Terminated` and Ctrl-C `KeyboardInterrupt` in the main thread.

    Where Ctrl-C is ignored from the start, as in a shell's background, it stays so.
    """
    _received.clear()
    signal.signal(signal.SIGTERM, _on_signal)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _on_signal)


def received() -> int | None:
    """The first such signal since `listen`; None when there was none.

    Libraries wrap what is raised inside of their callbacks, and then an interrupted run looks like a failed one.
    """
    return _received[0] if _received else None


@contextmanager
def held() -> Iterator[None]:
    """Let the first signal wait until the end of the body, for what must not be left half done; a second one does not.

    Such as creating a run: once its server has it, it must have an owner that will end it.
    """
    waiting: list[int] = []
    _held.append(waiting)
    try:
        yield
    finally:
        _held.pop()
    if waiting:
        _raise(waiting[0])


def _on_signal(number: int, frame: FrameType | None) -> None:
    _received.append(number)
    if _held and not _held[0]:
        _held[0].append(number)
        return
    _raise(number)


def _raise(number: int) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise Terminated(128 + number)
