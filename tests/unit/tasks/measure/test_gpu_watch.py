import gc
import os
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from paceline.tasks.measure import gpu
from paceline.tasks.measure.gpu import THREAD_NAME, GpuWatch, contexts_of, gpu_joules, num_foreign
from paceline.tasks.measure.validity import ValidityWatch
from paceline.tasks.records.measurement import Validity
from tests.support.patience import until

STRANGER = 2**22 + 1


class Board:
    """The calls of NVML that are used, for one GPU, which is idle until `work`."""

    NVML_CLOCK_SM = 1

    def __init__(self, pids=()):
        self.num_samples, self.num_opened = 0, 0
        self.violations = {0: 0, 1: 0}
        self.idle(pids)

    def work(self, clock, bits, pids, milliwatts=700_000):
        self.clock, self.bits, self.pids, self.milliwatts = clock, bits, pids, milliwatts

    def idle(self, pids=()):
        self.work(300, 0x1, pids, 100_000)

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return uuid

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return self.bits

    def nvmlDeviceGetClockInfo(self, handle, kind):
        return self.clock

    def nvmlDeviceGetMaxClockInfo(self, handle, kind):
        return 2000

    def nvmlDeviceGetPowerUsage(self, handle):
        return self.milliwatts

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        self.num_samples += 1
        return [SimpleNamespace(pid=pid) for pid in self.pids]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        return 5000

    NVML_COMPUTEMODE_EXCLUSIVE_PROCESS = 3

    def nvmlDeviceGetComputeMode(self, handle):
        return {"GPU-a": 3}.get(handle, 0)

    def nvmlDeviceGetViolationStatus(self, handle, policy):
        return SimpleNamespace(referenceTime=self.num_samples * 1000, violationTime=self.violations[policy])


@pytest.fixture
def board(monkeypatch):
    made = Board([os.getpid()])

    @contextmanager
    def opened():
        made.num_opened += 1
        yield made

    monkeypatch.setattr(gpu, "nvml", opened)
    return made


def meanwhile(board):
    """Let the thread take at least one sample of what the board does now."""
    seen = board.num_samples
    until(lambda: board.num_samples > seen + 1, "sample", every=0.01)


def own():
    return frozenset([os.getpid()])


def test_what_happens_while_the_gpu_works_is_seen(board):
    watch = ValidityWatch([os.getpid()], gpu_uuids=["GPU-a"])
    board.work(1200, 0x4 | 0x40, [os.getpid(), STRANGER])
    meanwhile(board)
    board.idle([os.getpid()])
    seen = watch.stop()
    assert seen.min_gpu_clock_fraction == pytest.approx(0.6)
    assert seen.throttled == ("power cap", "thermal")
    assert seen.foreign_device_processes == 1
    assert seen.contaminated is True
    assert 100 < seen.mean_gpu_watts < 700
    assert board.num_opened == 1, "the driver stays initialised"


def test_the_low_clock_of_an_idle_gpu_means_nothing(board):
    state = GpuWatch(["GPU-a"], own).stop()
    assert state == Validity(throttled_fraction=0.0, foreign_device_processes=0, mean_gpu_watts=100.0)


def test_time_that_the_driver_counts_is_a_share(board):
    watch = GpuWatch(["GPU-a"], own, seconds=0.001)
    meanwhile(board)
    board.violations[1] = int(board.num_samples * 1e6 * 0.5)  # nanoseconds, half of the time until now
    state = watch.stop()
    assert 0.01 < state.throttled_fraction <= 0.5
    assert state.throttled == ("thermal",)


def test_a_board_that_counts_nothing_has_no_share(board, monkeypatch):
    monkeypatch.delattr(Board, "nvmlDeviceGetViolationStatus")
    state = GpuWatch(["GPU-a"], own).stop()
    assert (state.throttled_fraction, state.throttled) == (None, ())


def test_a_child_that_is_gone_at_the_end_is_own(board):
    children = [frozenset([os.getpid()]), frozenset([os.getpid(), STRANGER])]
    watch = GpuWatch(["GPU-a"], lambda: children.pop(0), seconds=0.001)
    board.work(2000, 0, [os.getpid(), STRANGER])
    meanwhile(board)
    assert watch.stop().foreign_device_processes == 0


def test_a_watch_that_nobody_stops_ends_with_its_owner(board):
    watch = ValidityWatch([os.getpid()], gpu_uuids=["GPU-a"])
    assert THREAD_NAME in {thread.name for thread in threading.enumerate()}
    del watch
    gc.collect()
    until(lambda: THREAD_NAME not in {thread.name for thread in threading.enumerate()}, "end of the thread", every=0.01)


def test_a_slice_has_the_clock_of_its_board_and_no_power(board, monkeypatch):
    monkeypatch.setattr(
        Board, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", lambda self, handle: "board", raising=False
    )
    monkeypatch.setattr(Board, "nvmlDeviceGetClockInfo", lambda self, handle, kind: {"board": 1000}[handle])
    monkeypatch.setattr(Board, "nvmlDeviceGetPowerUsage", lambda self, handle: {"board": 1}.get(handle))
    board.work(1000, 0, [os.getpid()])
    state = GpuWatch(["MIG-a"], own).stop()
    assert (state.min_gpu_clock_fraction, state.mean_gpu_watts) == (0.5, None)


def test_contexts_of_a_process_are_found(board):
    assert contexts_of(os.getpid(), ["GPU-a", "GPU-b"]) == {"GPU-a": True, "GPU-b": False}
    assert contexts_of(STRANGER, ["GPU-a"]) == {}


def test_energy_of_all_gpus(board):
    assert gpu_joules(["GPU-a", "GPU-b"]) == pytest.approx(10.0)


def test_process_numbers_of_another_namespace_tell_nothing():
    strange, mixed = frozenset([7, 8]), frozenset([1])
    ours = frozenset([1, 2])
    assert num_foreign([strange], ours) is None
    assert num_foreign([strange, mixed], ours) == 0
    assert num_foreign([frozenset([1, 9]), frozenset([2, 8, 9])], ours) == 2
    assert num_foreign([frozenset()], ours) == 0
    assert num_foreign([], ours) is None
