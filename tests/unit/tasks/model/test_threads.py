"""Number of threads of torch, without another MKL."""

import json
import os
import subprocess
import sys

import pytest
import torch

from paceline.tasks.model.threads import _openmp_and_mkl, use_threads

LOOK = """
import ctypes, json, sys, threading
import torch
from paceline.tasks.model.threads import threads, use_threads

library = ctypes.CDLL(torch.__path__[0] + "/lib/libtorch_cpu.so")

def look():
    "Threads of torch; of MKL outside; and those of MKL inside a parallel region of two threads."
    inside = []
    body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: inside.append(library.mkl_serv_get_max_threads()))
    library.GOMP_parallel(body, None, 2, 0)
    return torch.get_num_threads(), library.mkl_serv_get_max_threads(), max(inside)

def look_in_a_thread_after(change):
    "A thread that has computed before the change."
    found, may_look = [], threading.Event()
    def work():
        torch.ones(40000) + 1
        computed.set()
        may_look.wait()
        found.append(look())
    computed = threading.Event()
    thread = threading.Thread(target=work)
    thread.start()
    computed.wait()
    change()
    may_look.set()
    thread.join()
    return found[0]

def look_in_a_new_thread():
    found = []
    thread = threading.Thread(target=lambda: (torch.ones(40000) + 1, found.append(look())))
    thread.start()
    thread.join()
    return found[0]

exec(sys.stdin.read())
"""
needs_mkl = pytest.mark.skipif(_openmp_and_mkl() is None, reason="this build of torch has no MKL")


def run_looks(body):
    """What the looks of `body` find, in a process of its own in which OMP_NUM_THREADS is 2."""
    environment = os.environ | {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", "MKL_DYNAMIC": "true"}
    program = f"found = [look()]\n{body}\nprint(json.dumps(found))"
    done = subprocess.run(
        [sys.executable, "-c", LOOK], input=program, env=environment, capture_output=True, text=True, check=True
    )
    first, *others = (tuple(one) for one in json.loads(done.stdout))
    if first[:2] != (2, 2):
        pytest.skip(f"OMP_NUM_THREADS=2 gives {first} threads here: one physical core")
    assert first == (2, 2, 1)
    return others


@pytest.fixture
def _restore():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@needs_mkl
def test_torchs_own_function_changes_mkl():
    """If this fails, torch has changed, and its function can be used again."""
    assert run_looks("torch.set_num_threads(2); found.append(look())") == [(2, 2, 2)]


@needs_mkl
def test_mkl_stays_as_in_a_script_that_sets_nothing():
    body = "use_threads(2); found.append(look()); use_threads(1); found.append(look()); use_threads(2); "
    body += "found += [look(), look_in_a_new_thread(), look()]"
    assert run_looks(body) == [(2, 2, 1), (1, 1, 1), (2, 2, 1), (2, 2, 1), (2, 2, 1)]


@needs_mkl
def test_threads_of_a_body_change_nothing_after_it():
    body = "use_threads(1)\nwith threads(2, then=1): found += [look(), look_in_a_new_thread()]\n"
    body += "found += [look(), look_in_a_new_thread()]"
    assert run_looks(body) == [(2, 2, 1), (2, 2, 1), (1, 1, 1), (1, 1, 1)]


@needs_mkl
def test_more_threads_than_physical_cores():
    """As with torch's own function: both use that many, and a smaller number later, in new threads too."""
    body = "use_threads(999); one = look(); use_threads(2); found += [one, look(), look_in_a_new_thread()]"
    assert [one[:2] for one in run_looks(body)] == [(999, 999), (2, 2), (2, 2)]


@needs_mkl
def test_a_large_number_does_not_stay_in_older_threads():
    body = "use_threads(1)\ndef change():\n    with threads(999, then=1): look()\n"
    body += "found += [look_in_a_thread_after(change), look(), look_in_a_new_thread()]"
    assert run_looks(body) == [(1, 1, 1), (1, 1, 1), (1, 1, 1)]


@needs_mkl
def test_a_loaders_thread_that_sets_another_number():
    """PyTorch's thread for pinned memory sets 1 for all threads that compute later."""
    body = "thread = threading.Thread(target=torch.set_num_threads, args=(1,)); thread.start(); thread.join(); "
    body += "use_threads(2); found += [look(), look_in_a_new_thread()]"
    assert [one[:2] for one in run_looks(body)] == [(2, 2), (2, 2)]


@needs_mkl
def test_an_error_in_the_body():
    body = "use_threads(1)\ntry:\n    with threads(2, then=1): raise KeyError\nexcept KeyError:\n    found += [look()]"
    assert run_looks(body) == [(1, 1, 1)]


@pytest.mark.usefixtures("_restore")
def test_the_calling_thread_uses_the_number():
    number = torch.get_num_threads() + 1
    use_threads(number)
    assert torch.get_num_threads() == number


@pytest.mark.usefixtures("_restore")
def test_a_build_without_these_functions(monkeypatch):
    monkeypatch.setattr("paceline.tasks.model.threads._openmp_and_mkl", lambda: None)
    number = torch.get_num_threads() + 1
    use_threads(number)
    assert torch.get_num_threads() == number
