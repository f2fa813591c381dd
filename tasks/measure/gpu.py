"""State of GPUs from their driver: clock, throttling, processes, energy.

Everything comes from NVML. Without a driver, or for a figure that a board does not give, there is None, never an error.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

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

T = TypeVar("T")


@dataclass(frozen=True)
class GpuSample:
    """One GPU at one moment; None where the driver does not report."""

    clock_fraction: float | None
    """Streaming-multiprocessor clock over the highest; None while the GPU is idle, when a low clock means nothing."""
    brakes: tuple[str, ...]
    pids: frozenset[int] | None  # processes with a compute context on it


@dataclass(frozen=True)
class GpuLoad:
    """Current use of one GPU; None where the driver does not report."""

    used_bytes: int | None
    memory_bytes: int | None
    busy_percent: float | None  # of the driver's last sampling period, in which a kernel ran
    watts: float | None
    most_watts: float | None  # the board's limit


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


def sample_gpus(uuids: Iterable[str]) -> dict[str, GpuSample]:
    """The state of each GPU now, by UUID; those that the driver does not know are left out."""
    with _handles(uuids) as (library, handles):
        return {uuid: _sample(library, handle) for uuid, handle in handles.items()}


def gpu_loads(uuids: Iterable[str]) -> dict[int, GpuLoad]:
    """Current use of each GPU, by NVML's index; GPUs unknown to the driver are left out."""
    with _handles(uuids) as (library, handles):
        indices = {read_nvml(library.nvmlDeviceGetIndex, handle): handle for handle in handles.values()}
        return {index: _load(library, handle) for index, handle in indices.items() if index is not None}


@contextmanager
def _handles(uuids: Iterable[str]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """NVML, and its handles by UUID; None and no handles without a driver."""
    listed = tuple(uuids)
    if not listed:
        yield None, {}
        return
    with nvml() as library:
        if library is None:
            yield None, {}
            return
        handles = {uuid: read_nvml(library.nvmlDeviceGetHandleByUUID, uuid) for uuid in listed}
        yield library, {uuid: handle for uuid, handle in handles.items() if handle is not None}


def gpu_joules(uuids: Iterable[str]) -> float | None:
    """Energy that all GPUs have used since their driver was loaded; None if one does not report."""
    selected = set(uuids)
    with _handles(selected) as (library, handles):
        counters = [read_nvml(library.nvmlDeviceGetTotalEnergyConsumption, handle) for handle in handles.values()]
    millijoules = [each for each in counters if each is not None]
    return sum(millijoules) / 1000 if selected and len(millijoules) == len(selected) else None


def _load(library: Any, handle: Any) -> GpuLoad:
    memory = read_nvml(library.nvmlDeviceGetMemoryInfo, handle)
    rates = read_nvml(library.nvmlDeviceGetUtilizationRates, handle)
    milliwatts = read_nvml(library.nvmlDeviceGetPowerUsage, handle)
    most_milliwatts = read_nvml(library.nvmlDeviceGetEnforcedPowerLimit, handle)
    return GpuLoad(
        used_bytes=None if memory is None else int(memory.used),
        memory_bytes=None if memory is None else int(memory.total),
        busy_percent=None if rates is None else float(rates.gpu),
        watts=None if milliwatts is None else milliwatts / 1000,
        most_watts=None if most_milliwatts is None else most_milliwatts / 1000,
    )


def _sample(library: Any, handle: Any) -> GpuSample:
    bits = int(read_nvml(library.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0)
    clock = read_nvml(library.nvmlDeviceGetClockInfo, handle, library.NVML_CLOCK_SM)
    highest = read_nvml(library.nvmlDeviceGetMaxClockInfo, handle, library.NVML_CLOCK_SM)
    processes = read_nvml(library.nvmlDeviceGetComputeRunningProcesses, handle)
    busy_clock = clock / highest if clock and highest and not bits & IDLE_BIT else None
    return GpuSample(
        clock_fraction=busy_clock,
        brakes=tuple(sorted({name for bit, name in BRAKES.items() if bits & bit})),
        pids=None if processes is None else frozenset(process.pid for process in processes),
    )


def num_foreign(samples: Iterable[GpuSample], own: frozenset[int]) -> int | None:
    """Largest number of foreign processes on any sampled GPU; None when unknown.

    In a container the driver may give the host's process numbers, which match no process here: a GPU that lists
    processes but none of the run's own gives no information.
    """
    counts = [
        len(sample.pids - own)
        for sample in samples
        if sample.pids is not None and (not sample.pids or sample.pids & own)
    ]
    return max(counts, default=None)
