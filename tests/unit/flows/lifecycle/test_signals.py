"""A signal ends the program as what it is, whatever the libraries in between make of it."""

import asyncio
import gc
import os
import signal
import subprocess
import sys

import pytest
from mlflow import MlflowClient
from prefect.exceptions import TerminationSignal
from prefect.logging import disable_run_logger
from prefect.utilities.engine import capture_sigterm

from paceline.conf.environment import Environment
from paceline.conf.load import load
from paceline.flows import cli
from paceline.flows.lifecycle import mlflow_run, signals
from paceline.tasks.errors import RunError
from paceline.tasks.track import run as tracking
from paceline.tasks.track.store import check_store


@pytest.fixture(autouse=True)
def handlers():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where the tests run in the background
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    signals._received.clear()


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


@pytest.fixture
def execute(monkeypatch):
    """Puts a function in the place of a command's."""
    patched = cli.COMMANDS["compare"]
    return lambda body: monkeypatch.setitem(cli.COMMANDS, "compare", patched._replace(execute=body))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("body", [killed, wrapped, failed])
def test_the_status_is_the_signals(body, number, execute, capsys):
    execute(lambda options: body(number))
    assert cli.main(["compare"]) == 128 + number
    assert "error: interrupted" in capsys.readouterr().err


def test_an_error_alone_is_a_failure(execute):
    def fail(options):
        raise RunError("broken")

    execute(fail)
    assert cli.main(["compare"]) == 1

    def crash(options):
        raise ValueError("a defect")

    execute(crash)
    with pytest.raises(ValueError, match="a defect"):
        cli.main(["compare"])


def test_ctrl_c_stays_ignored_where_it_was():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signals.listen()
    killed(signal.SIGINT)
    assert signals.received_signal() is None


@pytest.mark.parametrize(("body", "status"), [(killed, "KILLED"), (wrapped, "KILLED"), (None, "FAILED")])
def test_the_run_has_the_true_status(body, status, monkeypatch):
    told = []
    monkeypatch.setattr(mlflow_run, "_finish", lambda handle, status, error: told.append((status, error)))
    signals.listen()

    def tracked_body():
        with mlflow_run.ends_with_status(None, "; resume with: paceline run --resume 1"):
            if body:
                body(signal.SIGTERM)
            raise ValueError("broken")

    with pytest.raises((ValueError, SystemExit)):
        tracked_body()
    assert told == [(status, "interrupted; resume with: paceline run --resume 1" if body else "broken")]


@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_waits_for_what_must_not_be_left_half_done(number, error):
    signals.listen()
    done = []

    def whole():
        with signals.defer_signals():
            killed(number)
            with signals.defer_signals():
                done.append("both")
        done.append("never")

    with pytest.raises(error):
        whole()
    assert done == ["both"]
    with pytest.raises(error):  # and the next one is told at once again
        killed(number)


def test_a_second_signal_does_not_wait():
    signals.listen()

    def whole():
        with signals.defer_signals():
            killed(signal.SIGTERM)
            killed(signal.SIGINT)
            raise AssertionError("not reached")

    with pytest.raises(KeyboardInterrupt):
        whole()
    assert signals.received_signal() == signal.SIGTERM


def test_a_signal_that_waited_comes_after_an_error_too():
    signals.listen()

    def whole():
        with signals.defer_signals():
            killed(signal.SIGTERM)
            raise ValueError("broken")

    with pytest.raises(signals.Terminated):
        whole()


@pytest.mark.parametrize("body", [killed, wrapped, failed])
def test_in_a_deployments_process_prefects_own_signal_is_known(body):
    told = []

    def whole():
        with capture_sigterm():  # as Prefect's engine does around a flow
            try:
                body(signal.SIGTERM)
            except (TerminationSignal, ValueError, RunError) as error:
                told.append(signals.is_interruption(error))

    whole()
    assert told == [True]
    assert signals.received_signal() is None


def test_an_error_is_no_interruption():
    async def too_late():
        await asyncio.wait_for(asyncio.sleep(9), 0.01)  # a CancelledError is in its chain

    with pytest.raises(TimeoutError) as raised:
        asyncio.run(too_late())
    assert not signals.is_interruption(raised.value)


def test_prefects_signal_waits_too():
    done = []

    def whole():
        with capture_sigterm(), signals.defer_signals():
            killed(signal.SIGTERM)
            done.append("all")

    ours = []
    signal.signal(signal.SIGTERM, lambda *_: ours.append("passed on"))  # Prefect's hands it to who was there before
    with pytest.raises(TerminationSignal):
        whole()
    assert done == ["all"]
    assert ours == ["passed on"]


@pytest.mark.parametrize("when", ["while it is created", "at its end"])
def test_a_run_never_stays_running(when, tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    site, config = Environment(), load("digits")
    experiment_id = check_store(site.tracking_uri, config.track.experiment, site.artifact_root)
    signals.listen()

    begin, finish = tracking.begin, tracking.finish

    def killed_after(*arguments, **options):
        handle = begin(*arguments, **options)
        killed(signal.SIGTERM)
        return handle

    def killed_before(*arguments):
        killed(signal.SIGTERM)
        finish(*arguments)

    if when == "at its end":
        monkeypatch.setattr(tracking, "finish", killed_before)
    else:
        monkeypatch.setattr(tracking, "begin", killed_after)

    def whole():
        with mlflow_run.new_run(config, site, experiment_id, "run"):
            pass

    with disable_run_logger(), pytest.raises(SystemExit):
        whole()
    (run,) = MlflowClient(site.tracking_uri).search_runs([experiment_id])
    assert run.info.status == ("KILLED" if when == "while it is created" else "FINISHED")


LOSES = """
import gc, os, signal, sys, time
from paceline.flows.lifecycle import signals

lost = []

def collect(phase, facts):
    if not lost:
        lost.append(phase)
        os.kill(os.getpid(), signal.SIGTERM)

@signals.stop_on_signal
def body():
    gc.callbacks.append(collect)
    gc.collect()
    time.sleep(100)  # ends only if the signal is lost for good

signals.listen()
before = sys.unraisablehook
try:
    body()
except signals.Terminated:
    print("terminated", lost, sys.unraisablehook is before)
"""


def test_a_signal_whose_exception_is_lost_is_sent_again():
    """Once a run trained on for half a minute, and was killed then: the collector of garbage had the floor.

    In a process of its own, whose garbage is no other test's.
    """
    done = subprocess.run([sys.executable, "-c", LOSES], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout == "terminated ['start'] True\n", done.stderr


SLOW_HOOK = """
import threading, time
from paceline.flows.lifecycle import signals

signals.AGAIN_SECONDS = 0.0

def waits(function):
    def call(*arguments):
        function(*arguments)
        if threading.get_ident() == threading.main_thread().ident:
            time.sleep(0.3)

    return call

threading.Thread.start = waits(threading.Thread.start)
threading.Event.set = waits(threading.Event.set)
"""


def test_a_signal_is_not_sent_again_while_its_loss_is_being_told():
    """On a busy machine it came up there, where nothing can catch it, and was lost for good."""
    code = SLOW_HOOK + LOSES
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout == "terminated ['start'] True\n", done.stderr


def test_what_is_lost_and_no_signal_is_told_as_ever(monkeypatch):
    told = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)

    class Broken:
        def __del__(self):
            raise ValueError("a defect")

    @signals.stop_on_signal
    def body():
        Broken()
        gc.collect()

    body()
    assert "a defect" in [str(lost.exc_value) for lost in told], "beside the garbage of other tests"


@pytest.mark.parametrize("body", [wrapped, failed])
def test_a_flow_raises_what_the_signal_has_raised_and_not_what_was_made_of_it(body):
    with capture_sigterm(), pytest.raises(TerminationSignal) as raised:
        signals.stop_on_signal(body)(signal.SIGTERM)
    assert raised.value.signal == signal.SIGTERM
    assert isinstance(raised.value.__cause__, ValueError | RunError)


def test_an_error_of_a_flow_stays_what_it_is():
    @signals.stop_on_signal
    def body():
        raise RunError("broken")

    with pytest.raises(RunError, match="broken"):
        body()
