"""Time limits of stages."""

import threading
import time

import pytest

from paceline.tasks import deadline
from paceline.tasks.errors import StoppedError, TimeLimitError
from tests.support.refusals import refused


def test_without_a_limit_nothing_ends():
    assert deadline.seconds_left() is None
    deadline.check()
    assert deadline.within(threading.current_thread) is threading.current_thread()


def test_a_limit_is_named_and_ends_with_its_body():
    with deadline.time_limit("limits.train_seconds", 0.001):
        time.sleep(0.002)
        assert deadline.seconds_left() == 0
        with refused("limits.train_seconds", "limits.train_seconds=0.001", kind=TimeLimitError):
            deadline.check()
    deadline.check()


def test_what_hangs_is_left_behind_and_what_comes_back_is_handed_on():
    hang = threading.Event()
    with deadline.time_limit("limits.prepare_seconds", 0.05), pytest.raises(TimeLimitError):
        deadline.within(hang.wait)
    hang.set()
    with deadline.time_limit("limits.prepare_seconds", 60):
        assert deadline.within(lambda: deadline.seconds_left() is not None), "the limit holds in there too"
        with pytest.raises(ZeroDivisionError):
            deadline.within(lambda: 1 // 0)


def test_whoever_asked_for_the_work_may_end_it():
    wishes = [None, None, "pruned"]
    with deadline.stoppable(lambda: wishes.pop(0)):
        deadline.check()
        deadline.check()
        with pytest.raises(StoppedError, match=r"^pruned$"):
            deadline.check()
    deadline.check()
