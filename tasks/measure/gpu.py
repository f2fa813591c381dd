"""GPUs as their driver reports them: handles, load, energy.

Everything comes from NVML. Without a driver, or for a figure that a board does not give, there is None, never an error.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

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
