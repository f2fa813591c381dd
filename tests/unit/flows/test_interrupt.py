"""A signal ends the program as what it is, whatever the libraries in between make of it."""

import os
import signal

import pytest

from flows import cli, interrupt, tracked
from tasks.errors import RunError


@pytest.fixture(autouse=True)
def handlers():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where the tests run in the background
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    interrupt._received.clear()


def killed(number):
    os.kill(os.getpid(), number)


def wrapped(number):
    """As a serialiser does that calls back into Python."""
    try:
        killed(number)
    except BaseException as error:
        raise ValueError("an error occurred in a callback") from error


def failed(number):
    try:
        killed(number)
    except BaseException as error:
        raise RunError("something ended too soon") from error


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("body", [killed, wrapped, failed])
def test_the_status_is_the_signals(body, number, monkeypatch, capsys):
    monkeypatch.setattr(cli.compare, "execute", lambda options: body(number))
    assert cli.main(["compare"]) == 128 + number
    assert "paceline: interrupted" in capsys.readouterr().err


def test_an_error_alone_is_a_failure(monkeypatch):
    def fail(options):
        raise RunError("broken")

    monkeypatch.setattr(cli.compare, "execute", fail)
    assert cli.main(["compare"]) == 1

    def crash(options):
        raise ValueError("a defect")

    monkeypatch.setattr(cli.compare, "execute", crash)
    with pytest.raises(ValueError, match="a defect"):
        cli.main(["compare"])


def test_ctrl_c_stays_ignored_where_it_was():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupt.listen()
    killed(signal.SIGINT)
    assert interrupt.received() is None


@pytest.mark.parametrize(("body", "status"), [(killed, "KILLED"), (wrapped, "KILLED"), (None, "FAILED")])
def test_the_run_has_the_true_status(body, status, monkeypatch):
    told = []
    monkeypatch.setattr(tracked, "_finish", lambda handle, status, error: told.append((status, error)))
    interrupt.listen()

    def tracked_body():
        with tracked._truthful(None, "paceline run --resume 1"):
            if body:
                body(signal.SIGTERM)
            raise ValueError("broken")

    with pytest.raises((ValueError, SystemExit)):
        tracked_body()
    assert told == [(status, "interrupted; go on with: paceline run --resume 1" if body else "broken")]
