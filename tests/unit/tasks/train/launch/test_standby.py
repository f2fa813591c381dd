"""A process that waits to be a rank: what it becomes, and when it ends."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from paceline.tasks.train.launch.heartbeat import VARIABLE
from paceline.tasks.train.launch.standby import Standby, take

RANK = """
import os, sys
def main(spec_path):
    os.write(int(os.environ["PACELINE_PULSE"]), b"alive")
    print(spec_path, os.environ["FROM_THE_START"], os.environ["FROM_THE_ORDER"], repr(sys.stdin.read()), flush=True)
    print("in between", file=sys.stderr, flush=True)
    return 7
"""
WORKER = """
import os, sys, time
from paceline.tasks.train.launch.standby import Standby
standby = Standby(os.environ, "rank")
print(standby._process.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def environment(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    paths = (str(tmp_path), str(Path.cwd()), os.environ.get("PYTHONPATH"))
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "FROM_THE_START": "started"}


def test_it_becomes_the_rank_of_its_spec(environment, tmp_path):
    standby = Standby(environment, "rank")
    reading, writing = os.pipe()
    with (tmp_path / "log.txt").open("ab") as log, (tmp_path / "lease").open("w") as lease:
        fcntl.flock(lease, fcntl.LOCK_EX)
        process = standby.start(
            tmp_path / "spec.json", {"FROM_THE_ORDER": "ordered"}, log.fileno(), writing, lease.fileno()
        )
    os.close(writing)
    assert process.wait(30) == 7
    assert os.read(reading, 100) == b"alive"
    assert os.read(reading, 100) == b"", "it holds the pipe alone"
    os.close(reading)
    told = (tmp_path / "log.txt").read_text().splitlines()
    assert told == [f"{tmp_path / 'spec.json'} started ordered ''", "in between"]


def test_a_rank_does_not_import_mlflow():
    """It takes 2 s of both cores before the first step, and is the flow's."""
    program = "import sys, paceline.tasks.train.rank.main; sys.exit('mlflow' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_it_holds_its_lease_as_long_as_it_lives(environment, tmp_path):
    standby = Standby(environment, "time")  # whose `main` there is none of: it ends by an error
    reading, writing = os.pipe()
    with (tmp_path / "log.txt").open("ab") as log:
        lease = os.open(tmp_path / "lease", os.O_CREAT | os.O_RDWR)
        fcntl.flock(lease, fcntl.LOCK_EX)
        os.kill(standby._process.pid, signal.SIGSTOP)
        process = standby.start(tmp_path / "spec.json", {}, log.fileno(), writing, lease)
        os.close(lease)
    with (tmp_path / "lease").open() as other:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.kill(process.pid, signal.SIGCONT)
        assert process.wait(30) == 1
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
    os.close(reading)
    os.close(writing)


def test_one_that_is_gone_takes_no_order(environment, tmp_path):
    standby = Standby(environment, "rank")
    standby._process.kill()
    standby._process.wait()
    with (tmp_path / "log.txt").open("ab") as log:
        assert standby.start(tmp_path / "spec.json", {}, log.fileno(), log.fileno(), log.fileno()) is None


def test_it_is_taken_once_and_only_where_the_environment_is_the_same(environment):
    standby = Standby(environment, "rank")
    ready = [standby]
    assert take(ready, environment | {"OMP_NUM_THREADS": "3"}) is None
    assert take(ready, environment) is standby
    assert take(ready, environment) is None
    standby._process.kill()
    standby._process.wait()
    standby._orders.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_its_worker(environment, number):
    worker = subprocess.Popen([sys.executable, "-c", WORKER], env=environment, stdout=subprocess.PIPE)
    standby = psutil.Process(int(worker.stdout.readline()))
    assert VARIABLE not in standby.environ()
    worker.send_signal(number)
    worker.wait()
    worker.stdout.close()
    assert psutil.wait_procs([standby], timeout=60)[1] == []
