"""Devices that trainings of one process have chosen."""

import threading

import pytest

from paceline.tasks.train.launch.layout import Placement
from paceline.tasks.train.launch.placement import reserve, reserved_devices


def seat(device):
    return Placement(rank=0, worker=f"tcp://{device}", host="host", device=device, node_rank=0, local_rank=0)


def first_free(taken):
    free = [device for device in ("one", "two") if ("host", device) not in taken]
    return [seat(free[0] if free else "one")]


def test_two_at_the_same_moment_choose_different_devices():
    together, found = threading.Barrier(2), []

    def choose():
        together.wait()
        with reserve(first_free) as seats:
            found.append(seats[0].device)
            together.wait()

    threads = [threading.Thread(target=choose) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == ["one", "two"]
    assert reserved_devices() == set()


def test_one_that_waits_in_line_does_not_let_go_of_the_others_device():
    with reserve(first_free), reserve(first_free):
        with reserve(first_free) as third:
            assert third[0].device == "one"
        assert reserved_devices() == {("host", "one"), ("host", "two")}
    assert reserved_devices() == set()


def test_a_choice_that_fails_speaks_for_nothing():
    def fail(taken):
        raise OSError("no scheduler")

    with pytest.raises(OSError, match="no scheduler"), reserve(fail):
        pass
    assert reserved_devices() == set()
