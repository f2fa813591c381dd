"""Prefect's temporary API: it answers, it ends, and it says why where it cannot start."""

import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from paceline.flows.lifecycle.prefect_api import TemporaryApi
from paceline.tasks.errors import RunError
from tests.support.patience import until

COMMAND = """
import os, sys, time
from paceline.conf.environment import Environment
from paceline.flows.lifecycle import prefect_api
from paceline.flows.lifecycle.prefect_api import start_api, stop_unused_api
environment = Environment()
if sys.argv[1] not in ("used", "unused", "begun"):
    prefect_api.import_api(environment)
    api = prefect_api._running[0]
else:
    api = start_api()
print(api._process.pid, flush=True)
if "=" in sys.argv[1]:  # as in a profile of Prefect's
    name, _, os.environ[name] = sys.argv[1].partition("=")
    print(prefect_api.prepare_api(environment), flush=True)
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


def test_it_prepares_no_database_until_the_checks_of_a_run_have_passed(command, monkeypatch, tmp_path):
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    process, api = command("imported")
    until(lambda: "pipe" in Path(f"/proc/{api}/wchan").read_text(), "API that waits for its order")
    assert not list(tmp_path.glob("prefect.db*"))
    process.communicate()
    assert ended(api)


@pytest.mark.parametrize("named", ["PREFECT_API_URL=http://127.0.0.1:9/api", "PREFECT_SERVER_EPHEMERAL_ENABLED=false"])
def test_an_imported_one_ends_where_prefects_own_settings_need_none(command, named):
    process, api = command(named)
    assert process.stdout.readline() == "None\n"
    assert ended(api)


def test_it_answers_to_a_command_without_input():
    start = "from paceline.flows.lifecycle.prefect_api import start_api; print(start_api().url(120))"
    script = f"import os; os.close(0); {start}"
    url = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert url.startswith("http://127.0.0.1:")


def test_it_dies_with_a_command_that_is_killed(command):
    process, api = command("begun")
    process.kill()
    assert ended(api)


def test_why_it_cannot_start(monkeypatch):
    monkeypatch.setenv("PREFECT_API_DATABASE_CONNECTION_URL", "sqlite+aiosqlite:////proc/nothing/prefect.db")
    api = TemporaryApi()
    api.serve()
    with pytest.raises(RunError, match=r"ended with status 3 .*prefect server start"):
        api.url(60)
    api.end()
