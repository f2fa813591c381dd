"""Ctrl-C and SIGTERM as exceptions; remembers a signal when a library wraps or loses its exception."""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import ParamSpec, TypeVar

from paceline.tasks.errors import causes_of

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

AGAIN_SECONDS = 0.1  # delay before a lost signal is sent again
SIGNALS = (signal.SIGTERM, signal.SIGINT)
_received: list[int] = []
_deferring: list[bool] = []  # has an item inside of `defer_signals`


class Terminated(SystemExit):
    """Raised by SIGTERM."""


def listen() -> None:
    """Make SIGTERM raise `Terminated` and Ctrl-C `KeyboardInterrupt` in the main thread; an ignored Ctrl-C stays so."""
    _received.clear()
    signal.signal(signal.SIGTERM, _on_signal)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _on_signal)


def received_signal() -> int | None:
    """The first such signal since `listen`; None when there was none."""
    return _received[0] if _received else None


def is_interruption(error: BaseException) -> bool:
    """Return whether an error was caused by a signal.

    Libraries wrap exceptions from their callbacks, so that an interrupted run looks like a failed one. In a
    deployment's process Prefect handles the signals, and only its exceptions show them.
    """
    return received_signal() is not None or _origin(error) is not None


def _origin(error: BaseException | None) -> BaseException | None:
    """The exception of a signal among the causes of an error; None if there is none."""
    from prefect.exceptions import TerminationSignal  # late: `paceline --help` does not import Prefect

    ours = KeyboardInterrupt, SystemExit, TerminationSignal
    return next((cause for cause in causes_of(error) if isinstance(cause, ours)), None)


def stop_on_signal(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Stop a flow on SIGTERM or Ctrl-C even if a library swallows or wraps the exception.

    Python raises the exception wherever it is. A callback of the garbage collector prints and loses it: the signal is
    then sent again. If a library wraps it, the signal's own exception replaces the error, or Prefect would call the
    run FAILED.
    """

    @wraps(function)
    def call(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        with _resend_lost_signals():
            try:
                return function(*arguments, **options)
            except Exception as error:
                origin = _origin(error)
                if origin is None:
                    raise
                from prefect.exceptions import TerminationSignal

                # A new exception of the same kind: the chain of `origin` leads to the error that it replaces.
                if isinstance(origin, TerminationSignal):
                    raise TerminationSignal(signal=origin.signal) from error
                raise type(origin)(*origin.args) from error

    return call


@contextmanager
def _resend_lost_signals() -> Iterator[None]:
    before = sys.unraisablehook

    def hook(lost: "sys.UnraisableHookArgs", /) -> None:
        origin = _origin(lost.exc_value)
        if origin is None:
            before(lost)
            return
        number = signal.SIGINT if isinstance(origin, KeyboardInterrupt) else signal.SIGTERM
        threading.Thread(target=send, args=(number,), daemon=True).start()

    def send(number: int) -> None:
        main = threading.main_thread().ident
        assert main is not None
        time.sleep(AGAIN_SECONDS)
        while (top := sys._current_frames().get(main)) and any(
            frame.f_code is hook.__code__ for frame, _ in traceback.walk_stack(top)
        ):
            time.sleep(0.001)  # a signal raised in `hook` would be lost
        signal.pthread_kill(main, number)  # interrupts a sleeping main thread

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextmanager
def defer_signals() -> Iterator[None]:
    """Delay the first signal until the end of the body; a second signal is delivered at once.

    For steps that must not stop halfway, such as creating a run: once its server has it, a process must end it. The
    handlers in force, ours or Prefect's, get the signal at the end.
    """
    if _deferring or threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    deferred: list[int] = []

    def defer(number: int, frame: FrameType | None) -> None:
        deferred.append(number)
        handler = handlers[signal.Signals(number)]
        if len(deferred) > 1:
            _deliver(number, handler)
        elif handler is _on_signal:
            _received.append(number)

    for number, handler in handlers.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, defer)
    try:
        _deferring.append(True)
        yield
    finally:
        _deferring.clear()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if len(deferred) == 1:
            _deliver(deferred[0], handlers[signal.Signals(deferred[0])])


def _deliver(number: int, handler: object) -> None:
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
