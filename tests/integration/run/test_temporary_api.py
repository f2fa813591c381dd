"""Prefect's temporary API: it answers, it ends, and it says why where it cannot start."""

import subprocess
import sys
import time
import urllib.error
import urllib.request

import psutil
import pytest

from paceline.flows.lifecycle.prefect_api import TemporaryApi
from paceline.tasks.errors import RunError

COMMAND = """
import sys, time
from paceline.flows.lifecycle.prefect_api import start_api, stop_unused_api
api = start_api()
print(api._process.pid, flush=True)
if sys.argv[1] == "unused":
    stop_unused_api()
elif sys.argv[1] == "used":
    print(api.url(120), flush=True)
    stop_unused_api()
sys.stdin.read()
"""


@pytest.fixture
def command():
    """Starts a command with an API in a given state; returns it and the API's process id."""
    started = []

    def start(state):
        arguments = [sys.executable, "-c", COMMAND, state]
        process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process, int(process.stdout.readline())

    yield start
    for process in started:
        process.kill()
        process.communicate()


def ended(pid):
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not psutil.pid_exists(pid)


def test_it_answers_until_its_command_ends(command):
    process, api = command("used")
    url = process.stdout.readline().strip()
    assert urllib.request.urlopen(f"{url}/health", timeout=10).read() == b"true"
    with pytest.raises(urllib.error.HTTPError, match="401"):  # other users of the host reach its port
        urllib.request.urlopen(f"{url}/admin/version", timeout=10)
    process.communicate()  # its stdin ends, and so does it
    assert process.returncode == 0
    assert ended(api)


def test_one_that_nobody_waited_for_is_ended_at_once(command):
    _, api = command("unused")
    assert ended(api)


def test_it_dies_with_a_command_that_is_killed(command):
    process, api = command("begun")
    process.kill()
    assert ended(api)


def test_why_it_cannot_start(monkeypatch):
    monkeypatch.setenv("PREFECT_API_DATABASE_CONNECTION_URL", "sqlite+aiosqlite:////proc/nothing/prefect.db")
    api = TemporaryApi()
    with pytest.raises(RunError, match=r"ended with status 3 .*prefect server start"):
        api.url(60)
    api.end()
