"""Ctrl-C and SIGTERM: exceptions that let all be put away, and remembered should a library turn one into another."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

Arguments = ParamSpec("Arguments")
Found = TypeVar("Found")

AGAIN_SECONDS = 0.1
"""After a signal whose exception was lost and what lost it has come to its end, until it is sent again."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)
_received: list[int] = []
_holding: list[_Hold] = []
"""The outermost `defer_signals` that is entered, if any."""


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


def received_signal() -> int | None:
    """The first such signal since `listen`; None when there was none."""
    return _received[0] if _received else None


def is_interruption(error: BaseException) -> bool:
    """Whether an error is what became of a signal.

    Libraries wrap what is raised inside of their callbacks, and then an interrupted run looks like a failed one. In a
    deployment's process the signals are Prefect's, and only what it raised tells of them.
    """
    return received_signal() is not None or _origin(error) is not None


def _origin(error: BaseException) -> BaseException | None:
    """What a signal has raised, of which an error is the consequence; None where it is none's."""
    from prefect.exceptions import TerminationSignal  # where there is an error to judge, Prefect has been imported

    found: BaseException | None = error
    seen: set[int] = set()
    while found is not None and id(found) not in seen:
        if isinstance(found, KeyboardInterrupt | SystemExit | TerminationSignal):
            return found
        seen.add(id(found))
        found = found.__cause__ or found.__context__
    return None


def stop_on_signal(function: Callable[Arguments, Found]) -> Callable[Arguments, Found]:
    """Have a flow end by a signal that comes while it runs, whatever becomes of the exception that tells of it.

    A handler's exception comes up wherever Python is. In a callback of the garbage collector it is printed, and lost:
    the signal is sent again; where a library makes an error of its own of it, what the signal has raised goes on in its
    place, or Prefect would call the run FAILED. It stands around `discreet`, whose signature Prefect reads.
    """

    @wraps(function)
    def call(*arguments: Arguments.args, **options: Arguments.kwargs) -> Found:
        with _sent_again_when_lost():
            try:
                return function(*arguments, **options)
            except Exception as error:
                origin = _origin(error)
                if origin is None:
                    raise
                raise _like(origin) from error

    return call


def _like(origin: BaseException) -> BaseException:
    """Another one of its kind: the chain of the first leads to the error that it is to replace."""
    from prefect.exceptions import TerminationSignal

    if isinstance(origin, TerminationSignal):
        return TerminationSignal(signal=origin.signal)
    return type(origin)(*origin.args)


@contextmanager
def _sent_again_when_lost() -> Iterator[None]:
    before = sys.unraisablehook

    def hook(lost: UnraisableHookArgs, /) -> None:
        told = threading.Event()  # a signal that came up in here would be lost for good
        try:
            origin = _origin(lost.exc_value) if lost.exc_value is not None else None
            if origin is None:
                before(lost)
                return
            number = signal.SIGINT if isinstance(origin, KeyboardInterrupt) else signal.SIGTERM
            threading.Thread(target=_send_again, args=(number, told), daemon=True).start()
        finally:
            told.set()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


def _send_again(number: int, told: threading.Event) -> None:
    told.wait()
    time.sleep(AGAIN_SECONDS)
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, number)  # wakes what the main thread may sleep in, which another thread's does not


@contextmanager
def defer_signals() -> Iterator[None]:
    """Let the first signal wait until the end of the body, for what must not be left half done; a second one does not.

    Such as creating a run: once its server has it, it must have an owner that will end it. Whoever's handlers are
    in force, ours or Prefect's, they get the signal then.
    """
    if _holding or threading.current_thread() is not threading.main_thread():
        yield
        return
    hold = _Hold()
    hold.begin()
    try:
        _holding.append(hold)
        yield
    finally:
        _holding.clear()
        hold.end()
        hold.pass_on()


class _Hold:
    """Takes the place of the signals' handlers for a while."""

    def __init__(self) -> None:
        self._handlers = {number: signal.getsignal(number) for number in SIGNALS}
        self._received: list[int] = []

    def begin(self) -> None:
        for number, handler in self._handlers.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)

    def end(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def pass_on(self) -> None:
        """Give a signal that waited to whom it was meant for."""
        if len(self._received) == 1:
            self._tell(self._received[0])

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._received.append(number)
        if len(self._received) > 1:
            self._tell(number)
        elif self._handlers[signal.Signals(number)] is _on_signal:
            _received.append(number)

    def _tell(self, number: int) -> None:
        handler = self._handlers[signal.Signals(number)]
        if callable(handler):
            handler(number, None)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _on_signal(number: int, frame: FrameType | None) -> None:
    _received.append(number)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise Terminated(128 + number)
