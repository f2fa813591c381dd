import os
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from paceline.tasks.host import host_identity
from paceline.tasks.train.launch.rank_process import RANK_MODULE, running_ranks, supervisors_of
from paceline.tasks.train.rank.context import RankContext
from tests.support.patience import until

WORKER = """
import subprocess, sys
subprocess.run([sys.executable, "-c", "input()", "{}", "{}"], stdin=sys.stdin)
"""


@pytest.fixture
def seats():
    """Workers of two ranks of a run, and of a rank of another run."""
    specs = [f"/home/runs/{run}/rank-{number}/spec.json" for run, number in (("ours", 0), ("ours", 1), ("theirs", 0))]
    programs = [WORKER.format(RANK_MODULE, spec) for spec in specs]
    workers = [subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) for program in programs]
    until(lambda: all(psutil.Process(worker.pid).children() for worker in workers), "rank of each worker", every=0.02)
    yield [worker.pid for worker in workers]
    for worker in workers:
        worker.stdin.close()
        worker.wait()


def test_processes_of_every_seat_of_a_host_are_own(seats):
    first, second, stranger = seats
    ours = {first, second}
    for worker in seats[:2]:
        ours |= {child.pid for child in psutil.Process(worker).children()}
    spec = SimpleNamespace(run_id="ours", coordinator=(host_identity(), 7))
    found = set(RankContext.own_processes(SimpleNamespace(spec=spec)))
    assert ours | {7} <= found
    assert stranger not in found
    assert not found & {child.pid for child in psutil.Process(stranger).children()}


def test_the_supervisor_of_a_rank_is_its_parent(seats):
    first, second, _ = seats
    assert sorted(supervisors_of(running_ranks("ours"))) == sorted([first, second])
    assert supervisors_of([2**22 + 1, os.getpid()]) == [os.getppid()]
