"""GPUs as their driver reports them: handles, energy, and their state during a measurement.

Everything comes from NVML. Without a driver, or for a figure that a board does not give, there is None, never an error.
"""

import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

from paceline.tasks.records.measurement import Validity

POWER_CAP = "power cap"
CLOCK_SETTING = "clock setting"
HARDWARE_SLOWDOWN = "hardware slowdown"
THERMAL = "thermal"
IDLE_BIT = 0x1
# Bits of NVML's clocks event reasons (nvml.h): a board's clock is below the highest because of these.
BRAKES: dict[int, str] = {
    0x2: CLOCK_SETTING,
    0x4: POWER_CAP,
    0x8: HARDWARE_SLOWDOWN,
    0x20: THERMAL,
    0x40: THERMAL,
    0x80: HARDWARE_SLOWDOWN,  # the power brake of the board's supply
}
COUNTERS = {0: POWER_CAP, 1: THERMAL}  # NVML_PERF_POLICY_*: the driver counts the time of these brakes itself
MIN_COUNTED_FRACTION = 0.01  # of the time; the driver counts microseconds, which no arm of a measurement feels
SAMPLE_SECONDS = 0.2
THREAD_NAME = "gpu watch"

Pids = frozenset[int]
T = TypeVar("T")


@contextmanager
def nvml() -> Iterator[Any | None]:
    """The NVML module, initialised; None without a driver."""
    import pynvml  # only on use: most machines have no GPU

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def read_nvml(read: Callable[..., T], *arguments: Any) -> T | None:
    """Call NVML; None when the board or the driver does not support the call."""
    import pynvml

    try:
        return read(*arguments)
    except (pynvml.NVMLError, AttributeError):
        return None


@contextmanager
def handles(uuids: Iterable[str]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """NVML, and its handles by UUID; None and no handles without a driver."""
    listed = tuple(uuids)
    with nvml() if listed else nullcontext() as library:
        boards = {uuid: read_nvml(library.nvmlDeviceGetHandleByUUID, uuid) for uuid in listed} if library else {}
        yield library, {uuid: handle for uuid, handle in boards.items() if handle is not None}


def contexts_of(pid: int, uuids: Iterable[str]) -> dict[str, bool]:
    """GPUs on which a process holds a CUDA context, and whether each takes a single process (EXCLUSIVE_PROCESS)."""
    held = {}
    with handles(uuids) as (library, boards):
        for uuid, handle in boards.items():
            processes = read_nvml(library.nvmlDeviceGetComputeRunningProcesses, handle) or ()
            if pid in {process.pid for process in processes}:
                mode = read_nvml(library.nvmlDeviceGetComputeMode, handle)
                held[uuid] = mode == library.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS
    return held


def gpu_joules(uuids: Iterable[str]) -> float | None:
    """Energy that all GPUs have used since their driver was loaded; None if one does not report."""
    selected = set(uuids)
    with handles(selected) as (library, boards):
        counters = [read_nvml(library.nvmlDeviceGetTotalEnergyConsumption, handle) for handle in boards.values()]
    millijoules = [each for each in counters if each is not None]
    return sum(millijoules) / 1000 if selected and len(millijoules) == len(selected) else None


class GpuWatch:
    """Watches GPUs from its making to `stop()`: a thread samples clock, brakes, power and processes.

    Samples before and after a measurement would show idle GPUs alone. The driver stays initialised and its handles are
    reused, so that a sample takes four calls per GPU, none of which holds the interpreter's lock while the driver
    works. `own` gives the process ids of the run.
    """

    def __init__(self, uuids: Iterable[str], own: Callable[[], Pids], seconds: float = SAMPLE_SECONDS) -> None:
        self._nvml = ExitStack()
        library, boards = self._nvml.enter_context(handles(uuids))
        self._sampler = _Sampler([_Board(library, handle) for handle in boards.values()], own)
        self._ended = threading.Event()
        work, arguments = self._sampler.sample_until, (self._ended, seconds)
        self._thread = threading.Thread(target=work, args=arguments, name=THREAD_NAME, daemon=True)
        if boards:
            weakref.finalize(self, self._ended.set)  # a training that fails stops no watch
            self._thread.start()

    def stop(self) -> Validity:
        """Stop sampling; the fields of GPUs since the making."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        with self._nvml:
            return self._sampler.end()


class _Board:
    """One GPU, or one slice of a divided GPU (MIG), whose clock is the board's."""

    def __init__(self, library: Any, handle: Any) -> None:
        self._library, self._handle = library, handle
        board = getattr(library, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", None)
        self._board = (board and read_nvml(board, handle)) or handle
        self._highest = read_nvml(library.nvmlDeviceGetMaxClockInfo, self._board, library.NVML_CLOCK_SM)
        self._counted = self._count()

    def clock_and_brakes(self) -> tuple[float | None, int]:
        """Clock over the highest, None while idle, when a low clock means nothing; bits of the brakes."""
        bits = int(read_nvml(self._library.nvmlDeviceGetCurrentClocksThrottleReasons, self._board) or 0)
        clock = read_nvml(self._library.nvmlDeviceGetClockInfo, self._board, self._library.NVML_CLOCK_SM)
        return clock / self._highest if clock and self._highest and not bits & IDLE_BIT else None, bits

    def watts(self) -> float | None:
        """Power; None for a slice, whose board others use too."""
        milliwatts = read_nvml(self._library.nvmlDeviceGetPowerUsage, self._handle)
        return None if milliwatts is None else milliwatts / 1000

    def pids(self) -> Pids | None:
        """Processes with a compute context on it."""
        processes = read_nvml(self._library.nvmlDeviceGetComputeRunningProcesses, self._handle)
        return None if processes is None else frozenset(process.pid for process in processes)

    def braked_fractions(self) -> dict[str, float]:
        """Share of the time since the making in which each brake lowered the clock; empty where not counted."""
        now, fractions = self._count(), {}
        for brake, (time_us, braked_ns) in self._counted.items():
            if brake in now and now[brake][0] > time_us:
                fractions[brake] = (now[brake][1] - braked_ns) / 1000 / (now[brake][0] - time_us)
        return fractions

    def _count(self) -> dict[str, tuple[int, int]]:
        """By brake: the driver's clock in microseconds, and its counter in nanoseconds."""
        read = getattr(self._library, "nvmlDeviceGetViolationStatus", None)
        counted = {brake: read and read_nvml(read, self._board, policy) for policy, brake in COUNTERS.items()}
        return {brake: (each.referenceTime, each.violationTime) for brake, each in counted.items() if each}


class _Sampler:
    """What the samples have shown. Holds no reference to the watch, so that an abandoned watch ends its thread."""

    def __init__(self, boards: list[_Board], own: Callable[[], Pids]) -> None:
        self._boards, self._find_own = boards, own
        self._own, self._known, self._lists = Pids(), Pids(), set[Pids]()
        self._bits, self._lowest = 0, math.inf
        self._watts = (0.0, 0)  # sum and number
        self.sample()

    def sample(self) -> None:
        for board in self._boards:
            clock, bits = board.clock_and_brakes()
            self._bits |= bits
            self._lowest = min(self._lowest, clock or math.inf)
            if (pids := board.pids()) is not None:
                self._lists.add(pids)
                if not pids <= self._known:  # a child of the run may be gone at the end
                    self._known |= pids
                    self._own |= self._find_own()
        reported = [watts for board in self._boards if (watts := board.watts()) is not None]
        if reported and len(reported) == len(self._boards):
            self._watts = self._watts[0] + sum(reported), self._watts[1] + 1

    def sample_until(self, ended: threading.Event, seconds: float) -> None:
        while not ended.wait(seconds):
            self.sample()

    def end(self) -> Validity:
        self.sample()
        fractions = [pair for board in self._boards for pair in board.braked_fractions().items()]
        brakes = {name for bit, name in BRAKES.items() if self._bits & bit}
        brakes |= {brake for brake, share in fractions if share > MIN_COUNTED_FRACTION}
        return Validity(
            foreign_device_processes=num_foreign(self._lists, self._own),
            min_gpu_clock_fraction=None if self._lowest == math.inf else self._lowest,
            throttled=tuple(sorted(brakes)),
            throttled_fraction=max((share for _, share in fractions), default=None),
            mean_gpu_watts=self._watts[0] / self._watts[1] if self._watts[1] else None,
        )


def num_foreign(lists: Iterable[Pids], own: Pids) -> int | None:
    """Largest number of foreign processes with a compute context on any GPU at a time; None when unknown.

    In a container the driver may give the host's process numbers, which match no process here: a GPU that lists
    processes but none of the run's own gives no information.
    """
    return max((len(pids - own) for pids in lists if not pids or pids & own), default=None)
