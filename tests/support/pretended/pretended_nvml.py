"""NVML of a host with one GPU that is not there, as much of it as this program asks.

Variables of the environment: PRETENDED_SLICES, into how many slices (MIG) the GPU is divided; PRETENDED_CONTEXTS, a
directory in which processes with a CUDA context are noted, without which NVML cannot tell them;
PRETENDED_COMPUTE_MODE, a number of NVML_COMPUTEMODE_*.
"""

import os
import time
from pathlib import Path
from types import SimpleNamespace

UUID = "GPU-00000000-0000-0000-0000-000000000000"
NAME = "Pretended GPU"
MEMORY_BYTES = 8 << 30
NVML_CLOCK_SM = 1
NVML_DEVICE_MIG_ENABLE = 1
NVML_COMPUTEMODE_EXCLUSIVE_PROCESS = 3
NUM_SLICES = int(os.environ.get("PRETENDED_SLICES", "0"))
CONTEXTS = os.environ.get("PRETENDED_CONTEXTS")


class NVMLError(Exception):
    """What it says of what it does not know."""


def nvmlInit():
    """Nothing to begin."""


def nvmlShutdown():
    """Nothing to end."""


def nvmlSystemGetDriverVersion():
    """Of the driver."""
    return "0.0"


def nvmlDeviceGetCount():
    """One."""
    return 1


def nvmlDeviceGetHandleByIndex(index):
    """The GPU: handles are UUIDs."""
    if index != 0:
        raise NVMLError("no such GPU")
    return UUID


def nvmlDeviceGetHandleByUUID(uuid):
    """The GPU, or a slice of it."""
    if uuid not in (UUID, *_slices()):
        raise NVMLError(f"no GPU {uuid}")
    return uuid


def nvmlDeviceGetMigMode(handle):
    """Now, and after a reset."""
    return [int(NUM_SLICES > 0)] * 2


def nvmlDeviceGetMaxMigDeviceCount(handle):
    """More than there are."""
    return 7


def nvmlDeviceGetMigDeviceHandleByIndex(handle, index):
    """A slice."""
    if index >= NUM_SLICES:
        raise NVMLError("not found")
    return _slices()[index]


def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle):
    """The GPU of a slice."""
    if handle == UUID:
        raise NVMLError("not a slice")
    return UUID


def _slices():
    return [f"MIG-{number:08d}-0000-0000-0000-000000000000" for number in range(NUM_SLICES)]


def _refuse_slice(handle):
    if handle != UUID:
        raise NVMLError("not supported")


def nvmlDeviceGetUUID(handle):
    """Its name in this world."""
    return handle


def nvmlDeviceGetName(handle):
    """Its model."""
    return NAME if handle == UUID else f"{NAME} MIG 1g.{MEMORY_BYTES // NUM_SLICES >> 30}gb"


def nvmlDeviceGetCudaComputeCapability(handle):
    """Of a recent one."""
    _refuse_slice(handle)
    return 9, 0


def nvmlDeviceGetMemoryInfo(handle):
    """In bytes."""
    total = MEMORY_BYTES if handle == UUID else MEMORY_BYTES // NUM_SLICES
    return SimpleNamespace(total=total, free=total, used=0)


def nvmlDeviceGetIndex(handle):
    """Of the GPU among the host's."""
    return 0


def nvmlDeviceGetUtilizationRates(handle):
    """In percent."""
    return SimpleNamespace(gpu=50, memory=10)


def nvmlDeviceGetPowerUsage(handle):
    """In milliwatts."""
    _refuse_slice(handle)
    return 100_000


def nvmlDeviceGetEnforcedPowerLimit(handle):
    """In milliwatts."""
    return 400_000


def nvmlDeviceGetCurrentClocksThrottleReasons(handle):
    """None."""
    _refuse_slice(handle)
    return 0


def nvmlDeviceGetClockInfo(handle, clock):
    """In MHz."""
    return 1980


def nvmlDeviceGetMaxClockInfo(handle, clock):
    """In MHz."""
    return 1980


def nvmlDeviceGetViolationStatus(handle, policy):
    """Nothing has lowered its clock."""
    _refuse_slice(handle)
    return SimpleNamespace(referenceTime=time.monotonic_ns() // 1000, violationTime=0)


def nvmlDeviceGetComputeMode(handle):
    """Who may have a context."""
    return int(os.environ.get("PRETENDED_COMPUTE_MODE", "0"))


def nvmlDeviceGetComputeRunningProcesses(handle):
    """Living processes with a context."""
    if CONTEXTS is None:
        raise NVMLError("not supported")
    noted = Path(CONTEXTS).glob(f"{handle}.*")
    return [SimpleNamespace(pid=pid) for path in noted if Path(f"/proc/{(pid := int(path.suffix[1:]))}").exists()]


def open_context():
    """What CUDA does with the first visible GPU when a process first uses it."""
    if CONTEXTS is None:
        return
    handle = os.environ.get("CUDA_VISIBLE_DEVICES", UUID).split(",")[0]
    others = {process.pid for process in nvmlDeviceGetComputeRunningProcesses(handle)} - {os.getpid()}
    if others and nvmlDeviceGetComputeMode(handle) == NVML_COMPUTEMODE_EXCLUSIVE_PROCESS:
        raise RuntimeError(f"CUDA-capable device(s) is/are busy or unavailable: {others}")
    Path(CONTEXTS, f"{handle}.{os.getpid()}").touch()


def nvmlDeviceGetTotalEnergyConsumption(handle):
    """100 W, in millijoules."""
    return int(time.monotonic() * 100_000)


def nvmlDeviceSetCpuAffinity(handle):
    """All cores are as near."""
