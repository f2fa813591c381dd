"""Prefect's temporary API: it answers, it ends, and it says why where it cannot start."""

import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

COMMAND = """
import sys, threading, time
if sys.argv[2] == "program":
    threading.Thread(target=time.sleep, args=[600], daemon=True).start()  # a process with threads does not fork
from paceline.flows.lifecycle.prefect_api import start_api, stop_unused_api
from paceline.tasks.errors import RunError
api = start_api()
print(api._process.pid, flush=True)
if sys.argv[1] == "unused":
    stop_unused_api()
elif sys.argv[1] == "used":
    try:
        print(api.url(120), flush=True)
    except RunError as error:
        print(error, flush=True)
    stop_unused_api()
sys.stdin.read()
"""


@pytest.fixture(params=["fork", "program"])
def command(request):
    """Starts a command with an API in a given state; returns it and the API's process id."""
    started = []

    def start(state):
        arguments = [sys.executable, "-c", COMMAND, state, request.param]
        process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        api = int(process.stdout.readline())
        command = psutil.Process(api).cmdline()
        assert ("-c" in command, "-m" in command) == (request.param == "fork", request.param == "program")
        return process, api

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


def test_why_it_cannot_start(command, monkeypatch):
    monkeypatch.setenv("PREFECT_API_DATABASE_CONNECTION_URL", "sqlite+aiosqlite:////proc/nothing/prefect.db")
    process, api = command("used")
    said = process.stdout.readline()
    assert re.search(r"ended with status -?\d+ .*prefect server start", said), said
    assert ended(api)


def test_it_has_nothing_of_its_command_but_the_output_of_errors(command):
    process, api = command("used")
    process.stdout.readline()
    assert os.getsid(api) == api, "Ctrl-C of a terminal would reach it"
    opened = {path.name: path.readlink() for path in Path(f"/proc/{api}/fd").iterdir()}
    assert opened["0"] == Path("/dev/null")
    of_command = {Path(f"/proc/{process.pid}/fd/{number}").readlink() for number in (0, 1)}
    assert of_command.isdisjoint(opened.values())
