"""Number of threads of torch, without another MKL."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from paceline.tasks.model.threads import _mkl, threads, use_threads

DYNAMIC = """
import torch
from paceline.tasks.model.threads import _mkl, threads, use_threads
torch.ones(9) @ torch.ones(9)
found = []
def look():
    found.append((torch.get_num_threads(), _mkl().mkl_serv_get_dynamic()))
look()
use_threads(2)
look()
use_threads(3)
look()
with threads(1):
    look()
look()
torch.set_num_threads(2)
look()
print(found)
"""


def number_in_a_new_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


@pytest.fixture(autouse=True)
def _restore():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_threads_of_a_body():
    before = torch.get_num_threads()
    with threads(before + 1):
        assert (torch.get_num_threads(), number_in_a_new_thread()) == (before + 1, before + 1)
    assert (torch.get_num_threads(), number_in_a_new_thread()) == (before, before)
    with pytest.raises(ZeroDivisionError), threads(before + 2):
        raise ZeroDivisionError
    assert torch.get_num_threads() == before
    with threads(None):
        assert torch.get_num_threads() == before


def test_threads_from_now_on():
    number = torch.get_num_threads() + 1
    use_threads(number)
    assert (torch.get_num_threads(), number_in_a_new_thread()) == (number, number)


@pytest.mark.skipif(_mkl() is None, reason="this build of torch has no MKL")
def test_mkl_stays_as_in_a_script_that_sets_nothing():
    """The last pair shows what torch's own function does; where it no longer does it, this module can go."""
    environment = os.environ | {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
    command = [sys.executable, "-c", DYNAMIC]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[(2, 1), (2, 1), (3, 1), (1, 1), (3, 1), (2, 0)]"


@pytest.mark.skipif(_mkl() is None, reason="this build of torch has no MKL")
def test_a_thread_that_first_computes_in_the_body_changes_nothing_after_it():
    mkl, before = _mkl(), torch.get_num_threads()
    dynamic = mkl.mkl_serv_get_dynamic()
    with threads(before + 1):
        thread = threading.Thread(target=lambda: torch.ones(9) @ torch.ones(9))
        thread.start()
        thread.join()
    assert mkl.mkl_serv_get_dynamic() == dynamic
