"""A pool takes a command only under the same conditions, is closed to other users, and ends by itself."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from paceline.flows.lifecycle import pool
from tests.support.pools import start_pool

DIGEST = """
from pathlib import Path
from paceline.flows.lifecycle import pool
pool.PROGRAM = Path(pool.environment["TMPDIR"], "program")
print(pool.digest())
"""
OTHER_USER = 65534
END_IT = """
import socket, sys
it = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
it.connect(sys.argv[1])
try:
    it.send(b"end")
    print(it.recv(1) or "refused")
except ConnectionError:
    print("refused")
"""


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    """The directory of the pool's socket, and of what a digest looks at."""
    home, program = tmp_path / "home", tmp_path / "program"
    home.mkdir()
    (program / "flows").mkdir(parents=True)
    (program / "flows" / "code.py").touch()
    changes = {"XDG_RUNTIME_DIR": "", "TMPDIR": str(tmp_path), "HOME": str(home), "PREFECT_HOME": str(home)}
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(pool, "environment", dict(os.environ))
    return tmp_path


def digest(command=(sys.executable,), **changes):
    command = [*command, "-c", DIGEST]
    return subprocess.run(command, env=os.environ | changes, capture_output=True, text=True, check=True).stdout


def test_a_pool_fits_only_under_the_same_conditions(place):
    same = digest()
    assert digest(SHLVL="7", COLUMNS="40", _="/bin/sh") == same
    others = {
        "a variable": digest(OMP_NUM_THREADS="1"),
        "umask": digest(("sh", "-c", 'umask 077; exec "$0" "$@"', sys.executable)),
        "a limit": digest(("sh", "-c", 'ulimit -n 99; exec "$0" "$@"', sys.executable)),
        "an ignored signal": digest(("sh", "-c", 'trap "" HUP; exec "$0" "$@"', sys.executable)),
        "a core": digest(("taskset", "-c", "0", sys.executable)),
        "priority": digest(("nice", "-n", "1", sys.executable)),
        "the folder": digest(("sh", "-c", 'cd /; exec "$0" "$@"', sys.executable)),
        "Python": digest((sys.executable, "-O")),
    }
    (place / "program" / "flows" / "code.py").write_text("changed = True")
    others["the code"] = changed = digest()
    (place / "home" / "profiles.toml").write_text('active = "site"')
    others["Prefect's profile"] = digest()
    assert same not in others.values(), [name for name, value in others.items() if value == same]
    assert others["Prefect's profile"] != changed


@pytest.mark.parametrize(
    ("words", "fits"),
    [
        ("run digits recipe.num_epochs=1 --json", True),
        ("run config.yaml --code=.", True),
        ("run digits --show", False),
        ("run digits -q", False),
        ("run digits --log-format=json", False),
        ("run /dev/fd/63", False),
        ("run digits data.root=/dev/fd/63", False),
        ("watch script.py run", False),
        ("", False),
    ],
)
def test_only_runs_whose_words_mean_the_same_elsewhere(words, fits):
    assert pool._is_for_pool(words.split()) is fits


@pytest.mark.parametrize(
    ("given", "terminal", "variables", "wish"),
    [
        ("", True, {}, "15"),
        ("", False, {}, "off"),
        ("", True, {"CI": "true"}, "off"),
        ("off", True, {}, "off"),
        ("session", False, {}, "session"),
    ],
)
def test_a_pool_waits_by_default_only_in_a_terminal(monkeypatch, given, terminal, variables, wish):
    monkeypatch.setattr(os, "isatty", lambda descriptor: terminal)
    monkeypatch.delenv("CI", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert pool.wish(given) == wish


@pytest.fixture
def started():
    """Starts a pool as the end of a run does; the process of its keeper."""
    keepers = []

    def start(**how):
        start_pool(**how)
        give_up = time.monotonic() + 120
        while (pid := pool.end_pool(dry_run=True)) in (None, *(keeper.pid for keeper in keepers)):
            assert time.monotonic() < give_up, "it does not listen"
            time.sleep(0.05)
        keepers.append(psutil.Process(pid))
        return keepers[-1]

    yield start
    for keeper in keepers:
        if keeper.is_running():
            keeper.kill()


def wait_until_gone(keeper, *others):
    _, alive = psutil.wait_procs([keeper, *others], timeout=120)
    assert not alive


def child(keeper):
    give_up = time.monotonic() + 120
    while not (found := keeper.children()):
        assert time.monotonic() < give_up
        time.sleep(0.05)
    return found[0]


def test_it_ends_when_its_time_is_over(started):
    wait_until_gone(started(seconds=0.5))
    assert not pool.socket_path().exists()


def test_it_ends_with_the_session_of_its_terminal(started):
    shell = subprocess.Popen(["sleep", "600"], start_new_session=True)
    keeper = started(seconds=None, session=shell.pid)
    process = child(keeper)
    assert keeper.is_running()
    shell.kill()
    shell.wait()
    wait_until_gone(keeper, process)


def test_the_next_pool_takes_its_place(started):
    first = started()
    second = started()
    assert first != second
    wait_until_gone(first)
    assert pool.end_pool(dry_run=True) == second.pid


def test_a_command_under_other_conditions_ends_it_and_starts_cold(started, monkeypatch):
    keeper = started()
    process = child(keeper)
    monkeypatch.setenv(pool.VARIABLE, "15")
    monkeypatch.setattr(pool, "digest", lambda: "another")
    assert pool.hand_over(["paceline", "run", "digits"]) is None
    wait_until_gone(keeper, process)


def test_no_pool_is_a_cold_start(monkeypatch, capfd):
    monkeypatch.setenv(pool.VARIABLE, "15")
    assert pool.hand_over(["paceline", "run", "digits"]) is None
    pool.make_directory()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(pool.socket_path()))  # what a crash leaves
    assert pool.hand_over(["paceline", "run", "digits"]) is None
    assert capfd.readouterr() == ("", "")


def test_a_directory_that_others_may_enter_is_refused():
    assert pool.make_directory()
    pool.socket_path().parent.chmod(0o755)
    assert not pool.make_directory()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
def test_other_users_are_refused(started, place):
    keeper = started()
    for directory in (*place.parents, place, pool.socket_path().parent):  # only the check of the user is left
        if directory.stat().st_uid == 0 and directory != Path("/"):
            directory.chmod(directory.stat().st_mode | 0o011)
    pool.socket_path().chmod(0o666)
    command = ["setpriv", f"--reuid={OTHER_USER}", "--clear-groups", shutil.which("python3", path="/usr/bin:/bin")]
    command += ["-c", END_IT, str(pool.socket_path())]
    done = subprocess.run(command, timeout=60, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "refused"
    assert keeper.is_running()
    assert pool.end_pool() == keeper.pid
    wait_until_gone(keeper)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
def test_the_pool_of_another_user_gets_nothing(monkeypatch):
    monkeypatch.setenv(pool.VARIABLE, "15")
    pool.make_directory()
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(pool.socket_path()))
        pid = os.fork()
        if pid == 0:
            os.setresuid(OTHER_USER, OTHER_USER, OTHER_USER)
            listening.listen()  # the peer of a connection is the process that listens
            theirs.send(b"listens")
            theirs.send(listening.accept()[0].recv(pool.MAX_BYTES) or b"nothing")
            os._exit(0)
        try:
            ours.recv(100)
            assert pool.hand_over(["paceline", "run", "digits"]) is None
            assert ours.recv(100) == b"nothing"
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
