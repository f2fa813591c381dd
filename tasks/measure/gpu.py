"""What a GPU's driver tells of its state: clock, brakes, processes, energy. Knows nothing of runs and their limits.

Everything comes from NVML. Without a driver, or for a figure that a board does not give, there is None, never an error.
"""

from __future__ import annotations

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
    """One GPU at one moment; None where the driver does not tell."""

    clock_fraction: float | None
    """Streaming-multiprocessor clock over the highest; None while the GPU is idle, when a low clock means nothing."""
    brakes: tuple[str, ...]
    pids: frozenset[int] | None
    """Processes with a compute context on it."""


@dataclass(frozen=True)
class GpuLoad:
    """How much of one GPU is used now; None where the driver does not tell."""

    used_bytes: int | None
    memory_bytes: int | None
    busy_percent: float | None
    """Of the driver's last sampling period, in which a kernel ran."""
    watts: float | None
    most_watts: float | None
    """The board's limit."""


@contextmanager
def nvml() -> Iterator[Any | None]:
    """The NVML module, initialised; None where there is no driver."""
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


def told(read: Callable[..., T], *arguments: Any) -> T | None:
    """What a call of NVML returns; None when the board or the driver does not support it."""
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
    """How much of each GPU is used now, by NVML's index; those that the driver does not know are left out."""
    with _handles(uuids) as (library, handles):
        indices = {told(library.nvmlDeviceGetIndex, handle): handle for handle in handles.values()}
        return {index: _load(library, handle) for index, handle in indices.items() if index is not None}


@contextmanager
def _handles(uuids: Iterable[str]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """NVML, and its handles of the GPUs that it knows, by UUID; none of either where there is no driver."""
    wanted = tuple(uuids)
    if not wanted:
        yield None, {}
        return
    with nvml() as library:
        if library is None:
            yield None, {}
            return
        found = {uuid: told(library.nvmlDeviceGetHandleByUUID, uuid) for uuid in wanted}
        yield library, {uuid: handle for uuid, handle in found.items() if handle is not None}


def gpu_joules(uuids: Iterable[str]) -> float | None:
    """Energy that the GPUs have used since their driver was loaded, all together; None when one does not tell."""
    wanted = set(uuids)
    with _handles(wanted) as (library, handles):
        found = [told(library.nvmlDeviceGetTotalEnergyConsumption, handle) for handle in handles.values()]
    millijoules = [each for each in found if each is not None]
    return sum(millijoules) / 1000 if wanted and len(millijoules) == len(wanted) else None


def _load(library: Any, handle: Any) -> GpuLoad:
    memory = told(library.nvmlDeviceGetMemoryInfo, handle)
    rates = told(library.nvmlDeviceGetUtilizationRates, handle)
    milliwatts = told(library.nvmlDeviceGetPowerUsage, handle)
    most_milliwatts = told(library.nvmlDeviceGetEnforcedPowerLimit, handle)
    return GpuLoad(
        used_bytes=None if memory is None else int(memory.used),
        memory_bytes=None if memory is None else int(memory.total),
        busy_percent=None if rates is None else float(rates.gpu),
        watts=None if milliwatts is None else milliwatts / 1000,
        most_watts=None if most_milliwatts is None else most_milliwatts / 1000,
    )


def _sample(library: Any, handle: Any) -> GpuSample:
    bits = int(told(library.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0)
    clock = told(library.nvmlDeviceGetClockInfo, handle, library.NVML_CLOCK_SM)
    highest = told(library.nvmlDeviceGetMaxClockInfo, handle, library.NVML_CLOCK_SM)
    processes = told(library.nvmlDeviceGetComputeRunningProcesses, handle)
    busy_clock = clock / highest if clock and highest and not bits & IDLE_BIT else None
    return GpuSample(
        clock_fraction=busy_clock,
        brakes=tuple(sorted({name for bit, name in BRAKES.items() if bits & bit})),
        pids=None if processes is None else frozenset(process.pid for process in processes),
    )


def num_foreign(samples: Iterable[GpuSample], own: frozenset[int]) -> int | None:
    """Most processes of others on any sampled GPU; None when it cannot be told.

    In a container the driver may give the host's process numbers, which match no process here: a GPU that lists
    processes but none of the run's own tells nothing.
    """
    counts = [
        len(sample.pids - own)
        for sample in samples
        if sample.pids is not None and (not sample.pids or sample.pids & own)
    ]
    return max(counts, default=None)
