"""Questions to many workers in few messages, and the results of many tasks at once, with real workers."""

import asyncio
import os
import signal
import time

import pytest

from paceline.tasks.cluster import client as module
from paceline.tasks.cluster.client import call_workers, connect, fetch, workers
from tests.support.jobs import two_workers


@pytest.fixture(scope="module")
def client():
    with two_workers() as address, connect(address) as connected:
        yield connected


def pids(client, seconds=10.0):
    first, second = workers(client)
    requests = [(first, os.getpid, ()), (second, pow, (2, 5))]
    return call_workers(client, requests, seconds, batched=True)


def test_a_message_carries_the_requests_of_several_workers(client, monkeypatch):
    monkeypatch.setattr(module, "MAX_MESSAGES", 1)
    sent = []
    run = client.run
    monkeypatch.setattr(client, "run", lambda *given, **more: sent.append(more["workers"]) or run(*given, **more))
    pid, power = pids(client)
    assert (pid != os.getpid(), power) == (True, 32)
    assert sent == [workers(client)]


def test_a_worker_that_is_silent_costs_the_others_of_its_message_no_answer(client, monkeypatch):
    monkeypatch.setattr(module, "MAX_MESSAGES", 1)
    pid, _ = pids(client)
    os.kill(pid, signal.SIGSTOP)
    try:
        silent, power = pids(client, seconds=1.0)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert isinstance(silent, TimeoutError)
    assert power == 32


def test_an_error_of_one_worker_is_its_answer(client, monkeypatch):
    monkeypatch.setattr(module, "MAX_MESSAGES", 1)
    first, second = workers(client)
    requests = [(first, divmod, (1, 0)), (second, divmod, (7, 2))]
    error, answer = call_workers(client, requests, 10.0, batched=True)
    assert isinstance(error, ZeroDivisionError)
    assert answer == (3, 1)


def test_results_come_all_at_once(client):
    futures = [client.submit(time.monotonic, key=f"clock-{number}", pure=False) for number in range(4)]
    assert len(set(fetch(client, futures, 10.0))) == 4


def test_a_scheduler_is_reached_also_where_an_event_loop_runs():
    async def count(address):
        with connect(address) as client:
            return len(workers(client))

    with two_workers() as address:
        assert asyncio.run(count(address)) == 2
