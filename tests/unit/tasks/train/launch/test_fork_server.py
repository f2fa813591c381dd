"""A server that forks ranks: what they are, and what ends when a rank, a supervisor, the server or the flow ends."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from paceline.tasks.train.launch.fork_server import ENDED, ForkServer, fork_rank
from tests.support.patience import until

RANK = """
import os, random, subprocess, sys, time
import numpy
import early
def main(spec_path):
    os.write(int(os.environ["PACELINE_PULSE"]), b"alive")
    print(spec_path, os.environ["FROM_THE_START"], os.environ["FROM_THE_ORDER"], repr(sys.stdin.read()), flush=True)
    print(early.pid, random.random(), numpy.random.random(), file=sys.stderr, flush=True)
    if "wait" in spec_path:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print("child", child.pid, flush=True)
        time.sleep(600)
    if "raise" in spec_path:
        raise KeyError("no rank")
    return 7
"""
ANSWERS = """
import os
def main():
    while line := os.read(0, 100):
        if line == b"end\\n":
            raise SystemExit(3)
        os.write(1, f"{os.getpid()} {os.getppid()} {'FROM_THE_START' in os.environ}\\n".encode())
"""
FLOW = """
import os, time
from paceline.tasks.train.launch.fork_server import ForkServer
server = ForkServer(os.environ, "rank", "answers", "early")
print(server.process.pid, server.address, flush=True)
time.sleep(600)
"""
SUPERVISOR = """
import os, sys, time
from pathlib import Path
from paceline.tasks.train.launch.fork_server import fork_rank
with open(sys.argv[2], "ab") as log:
    rank = fork_rank(sys.argv[1], Path("wait.json"), os.environ, {"FROM_THE_ORDER": "x"}, [log.fileno()] * 3)
print(rank.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def environment(tmp_path):
    for name, text in (
        ("rank", RANK),
        ("answers", ANSWERS),
        ("early", "import os\nprint('noise')\npid = os.getpid()\n"),
    ):
        (tmp_path / f"{name}.py").write_text(text)
    paths = (str(tmp_path), str(Path.cwd()), os.environ.get("PYTHONPATH"))
    return os.environ | {
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "FROM_THE_START": "started",
    }


@pytest.fixture
def server(environment):
    started = ForkServer(environment, "rank", "answers", "early")
    yield started
    started.end()


@pytest.fixture
def order(server, environment, tmp_path):
    """Orders a rank; its process."""

    def order(name, **changed):
        reading, writing = os.pipe()
        with (tmp_path / f"{name}.txt").open("ab") as log:
            descriptors = [log.fileno(), writing, log.fileno()]
            rank = fork_rank(
                server.address, Path(f"{name}.json"), environment | changed, {"FROM_THE_ORDER": "x"}, descriptors
            )
        os.close(writing)
        opened.callback(os.close, reading)
        if rank is not None:
            opened.callback(rank._server.close)
        return rank

    with ExitStack() as opened:
        yield order


def ask(server, line="who\n"):
    server.process.stdin.write(line)
    server.process.stdin.flush()
    return server.process.stdout.readline()


def child_of(rank, path):
    """The process that a rank has started, by its log."""
    until(lambda: "child" in path.read_text(), "child")
    return psutil.Process(int(path.read_text().split("child ")[1].split()[0]))


def test_ranks_share_the_imports_and_are_else_like_fresh_processes(server, order, tmp_path):
    ranks = [order("first"), order("second")]
    assert [rank.wait(60) for rank in ranks] == [7, 7]
    assert [rank.poll() for rank in ranks] == [7, 7]
    logs = [(tmp_path / f"{name}.txt").read_text().splitlines() for name in ("first", "second")]
    assert [lines[0] for lines in logs] == ["first.json started x ''", "second.json started x ''"]
    (early, *random), (same, *other) = (lines[1].split() for lines in logs)
    assert early == same == str(server.process.pid), "it was imported once"
    assert not set(random) & set(other), "each has random numbers of its own"


def test_another_process_answers_requests(server, order, tmp_path):
    answer = ask(server)
    answering, parent, has_environment_of_rank = answer.split()
    assert int(parent) == server.process.pid
    assert has_environment_of_rank == "False", "it has that of the flow"
    assert ask(server) == answer
    rank = order("wait")
    assert ask(server) == answer, "next to a rank too"
    assert rank.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        rank.wait(0.1)
    server.process.stdin.close()
    until(lambda: not psutil.pid_exists(int(answering)), "its end when nobody asks any more")
    assert order("next").wait(60) == 7


def test_the_end_of_the_process_that_answers_is_an_answer(server, order):
    assert ask(server, "end\n") == f"{ENDED}3\n"
    assert order("next").wait(60) == 7


def test_a_rank_of_another_environment_is_not_forked(order):
    assert order("other", OMP_NUM_THREADS="3") is None
    rank = order("same", DASK_DISTRIBUTED__X="1", PACELINE_JSON_LOGS="1")
    assert rank.wait(60) == 7


def test_a_server_that_is_gone_forks_nothing(server, order):
    server.end()
    assert order("late") is None


def test_a_stranger_without_an_order_changes_nothing(server, order):
    for text in (b"", b"{", b"[]"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect(f"\0{server.address}")
            stranger.send(text)
            if text:
                assert stranger.recv(10) == b""
    assert order("next").wait(60) == 7


def test_an_error_is_in_the_log(order, tmp_path):
    assert order("raise").wait(60) == 1
    assert "KeyError: 'no rank'" in (tmp_path / "raise.txt").read_text()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_rank_is_reported_and_its_number_is_kept_until_then(order, number):
    rank = order("wait")
    os.kill(rank.pid, number)
    until(lambda: psutil.Process(rank.pid).status() == psutil.STATUS_ZOMBIE, "its end")
    assert rank.wait(60) == -number
    until(lambda: not psutil.pid_exists(rank.pid), "end of the zombie")


def test_a_group_is_killed_as_a_whole(order, tmp_path):
    rank = order("wait")
    child = child_of(rank, tmp_path / "wait.txt")
    os.killpg(rank.pid, signal.SIGKILL)
    assert rank.wait(60) == -signal.SIGKILL
    assert psutil.wait_procs([child], timeout=30)[1] == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_ends_with_its_supervisor_and_others_go_on(server, order, environment, tmp_path, number):
    other = order("next-to-it-wait")
    log = tmp_path / "log.txt"
    command = [sys.executable, "-c", SUPERVISOR, server.address, str(log)]
    supervisor = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
    rank = psutil.Process(int(supervisor.stdout.readline()))
    child = child_of(rank, log)
    supervisor.send_signal(number)
    supervisor.wait()
    supervisor.stdout.close()
    assert psutil.wait_procs([rank, child], timeout=60)[1] == []
    assert other.poll() is None
    assert order("next").wait(60) == 7


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_for_all_processes_of_a_service_leaves_the_server(server, order, number):
    assert order("first").wait(60) == 7
    os.kill(server.process.pid, number)
    assert order("next").wait(60) == 7


def test_ranks_end_with_the_server(server, order):
    rank = order("wait")
    process = psutil.Process(rank.pid)
    server.process.kill()
    assert rank.wait(60) == -signal.SIGKILL
    assert psutil.wait_procs([process], timeout=60)[1] == []


def test_all_end_with_the_flow(environment, tmp_path):
    flow = subprocess.Popen([sys.executable, "-c", FLOW], env=environment, stdout=subprocess.PIPE, text=True)
    pid, address = flow.stdout.readline().split()
    reading, writing = os.pipe()
    with (tmp_path / "log.txt").open("ab") as log:
        rank = fork_rank(
            address, Path("wait.json"), environment, {"FROM_THE_ORDER": "x"}, [log.fileno(), writing, writing]
        )
    server = psutil.Process(int(pid))
    all_of_them = [server, *server.children()]
    assert len(all_of_them) == 3
    flow.kill()
    flow.wait()
    flow.stdout.close()
    assert psutil.wait_procs(all_of_them, timeout=60)[1] == []
    assert rank.wait(60) == -signal.SIGKILL
    os.close(reading)
    os.close(writing)
