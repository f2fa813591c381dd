"""A pool takes a command only under the same conditions, is closed to other users, and ends by itself."""

import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from paceline.flows.lifecycle import next_pool, pool, pool_keeper
from tests.support.pools import facts_for_pool, start_pool

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
    yield tmp_path
    pool.end_pool()  # what a test that fails has left


def digest(command=(sys.executable,), **changes):
    command = [*command, "-c", DIGEST]
    return subprocess.run(command, env=os.environ | changes, capture_output=True, text=True, check=True).stdout


def test_a_pool_fits_only_under_the_same_conditions(place):
    same = digest()
    assert digest(SHLVL="7", _="/bin/sh") == same
    others = {
        "a variable": digest(OMP_NUM_THREADS="1"),
        "the width of the terminal": digest(COLUMNS="40"),
        "umask": digest(("sh", "-c", 'umask 077; exec "$0" "$@"', sys.executable)),
        "a limit": digest(("sh", "-c", 'ulimit -n 99; exec "$0" "$@"', sys.executable)),
        "an ignored signal": digest(("sh", "-c", 'trap "" USR1; exec "$0" "$@"', sys.executable)),
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
        ("run digits data.root=/proc/self/cwd", False),
        ("", False),
    ],
)
def test_only_runs_whose_words_mean_the_same_elsewhere(words, fits):
    assert pool._is_for_pool(words.split()) is fits


@pytest.mark.parametrize(
    ("given", "terminal", "variables", "waits"),
    [
        ("", True, {}, "15"),
        ("", False, {}, "off"),
        ("", True, {"CI": "true"}, "off"),
        ("off", True, {}, "off"),
        ("session", False, {}, "session"),
    ],
)
def test_a_pool_waits_by_default_only_in_a_terminal(monkeypatch, given, terminal, variables, waits):
    monkeypatch.setattr(os, "isatty", lambda descriptor: terminal)
    monkeypatch.delenv("CI", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert pool.waiting_time(given) == waits


def listening_keeper(*before):
    give_up = time.monotonic() + 120
    while (pid := pool.end_pool(dry_run=True)) in (None, *(keeper.pid for keeper in before)):
        assert time.monotonic() < give_up, "it does not listen"
        time.sleep(0.05)
    return psutil.Process(pid)


@pytest.fixture
def started():
    """Starts a pool as the end of a run does; the process of its keeper."""
    keepers = []

    def start(**how):
        start_pool(**how)
        keepers.append(listening_keeper(*keepers))
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


def test_none_is_left_for_a_session_that_has_ended():
    shell = subprocess.Popen(["true"])
    shell.wait()
    facts = facts_for_pool(seconds=None, session=shell.pid).encode()
    keeper = [sys.executable, "-P", "-m", next_pool.KEEPER]
    subprocess.run(keeper, input=facts, env=pool.environment, check=True, timeout=120)
    assert not pool.socket_path().exists()


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
    pool.make_socket_directory()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(pool.socket_path()))  # what a crash leaves
    assert pool.hand_over(["paceline", "run", "digits"]) is None
    assert capfd.readouterr() == ("", "")


def test_a_keeper_that_is_stopped_delays_a_command_but_never_holds_it(started, monkeypatch, capfd):
    keeper = started()
    process = child(keeper)
    monkeypatch.setenv(pool.VARIABLE, "15")
    keeper.suspend()
    assert pool.hand_over(["paceline", "run", "digits"]) is None
    keeper.resume()  # it gets an order whose command has ended
    wait_until_gone(keeper, process)
    assert capfd.readouterr() == ("", "")


def test_a_keeper_that_is_stopped_can_be_ended(started):
    keeper = started()
    process = child(keeper)
    keeper.suspend()
    assert pool.end_pool() == keeper.pid
    wait_until_gone(keeper, process)


def test_a_socket_of_a_very_long_path_is_a_cold_start(monkeypatch, place):
    long = place / ("x" * 100)
    long.mkdir()
    monkeypatch.setitem(pool.environment, "TMPDIR", str(long))
    monkeypatch.setenv(pool.VARIABLE, "15")
    assert pool.hand_over(["paceline", "run", "digits"]) is None
    assert pool.end_pool() is None


@pytest.mark.parametrize(
    ("words", "ends"),
    [
        ("run digits -q", True),
        ("judge -- true", True),
        ("sweep digits", True),
        ("-q --log-format json no-gpu folder", True),
        ("doctor --measure", True),
        ("doctor", False),
        ("run digits --show", False),
        ("judge --help", False),
        ("clean", False),
        ("", False),
    ],
)
def test_a_command_that_measures_and_starts_cold_ends_the_pool(monkeypatch, words, ends):
    ended = []
    monkeypatch.setattr(pool, "end_pool", lambda: ended.append(True))
    pool.end_before_measuring(words.split())
    assert bool(ended) is ends


def test_modules_in_the_folder_of_the_user_are_not_imported(started, place, monkeypatch):
    (place / "select.py").write_text("raise SystemExit")
    monkeypatch.chdir(place)
    started()  # or it would never listen


def test_a_lock_of_a_database_is_seen(tmp_path):
    with closing(sqlite3.connect(tmp_path / "prefect.db", isolation_level=None)) as database:
        database.execute("create table runs (id)")
        assert not pool_keeper._has_lock([os.getpid()])
        database.execute("begin immediate")
        assert pool_keeper._has_lock([os.getpid()])
        database.execute("rollback")
        assert not pool_keeper._has_lock([os.getpid()])


def test_an_installation_ends_it(place):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place / "venv"], check=True)
    [packages] = (place / "venv").glob("lib/python*/site-packages")
    paths = os.pathsep.join(filter(None, sys.path))
    start_pool(python=place / "venv/bin/python", variables={"PYTHONPATH": paths})
    keeper = listening_keeper()
    process = child(keeper)
    (packages / "removed.dist-info").mkdir()
    wait_until_gone(keeper, process)


def test_a_directory_that_others_may_enter_is_refused():
    assert pool.make_socket_directory()
    pool.socket_path().parent.chmod(0o755)
    assert not pool.make_socket_directory()


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
    pool.make_socket_directory()
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


def test_lines_of_json_need_engines_that_are_imported_for_them(monkeypatch):
    monkeypatch.setitem(pool.environment, "PACELINE_LOG_FORMAT", "json")
    assert not pool._is_for_pool(["run", "digits"])
