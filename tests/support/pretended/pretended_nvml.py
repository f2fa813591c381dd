"""NVML of a host with one GPU that is not there, as much of it as this program asks."""

import time
from types import SimpleNamespace

UUID = "GPU-00000000-0000-0000-0000-000000000000"
NAME = "Pretended GPU"
MEMORY_BYTES = 8 << 30
NVML_CLOCK_SM = 1


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
    """The GPU."""
    if index != 0:
        raise NVMLError("no such GPU")
    return 0


def nvmlDeviceGetHandleByUUID(uuid):
    """The GPU."""
    if uuid != UUID:
        raise NVMLError(f"no GPU {uuid}")
    return 0


def nvmlDeviceGetUUID(handle):
    """Its name in this world."""
    return UUID


def nvmlDeviceGetName(handle):
    """Its model."""
    return NAME


def nvmlDeviceGetCudaComputeCapability(handle):
    """Of a recent one."""
    return 9, 0


def nvmlDeviceGetMemoryInfo(handle):
    """In bytes."""
    return SimpleNamespace(total=MEMORY_BYTES, free=MEMORY_BYTES, used=0)


def nvmlDeviceGetIndex(handle):
    """Of the GPU among the host's."""
    return 0


def nvmlDeviceGetUtilizationRates(handle):
    """In percent."""
    return SimpleNamespace(gpu=50, memory=10)


def nvmlDeviceGetPowerUsage(handle):
    """In milliwatts."""
    return 100_000


def nvmlDeviceGetEnforcedPowerLimit(handle):
    """In milliwatts."""
    return 400_000


def nvmlDeviceGetCurrentClocksThrottleReasons(handle):
    """None."""
    return 0


def nvmlDeviceGetClockInfo(handle, clock):
    """In MHz."""
    return 1980


def nvmlDeviceGetMaxClockInfo(handle, clock):
    """In MHz."""
    return 1980


def nvmlDeviceGetComputeRunningProcesses(handle):
    """It cannot tell."""
    raise NVMLError("not supported")


def nvmlDeviceGetTotalEnergyConsumption(handle):
    """100 W, in millijoules."""
    return int(time.monotonic() * 100_000)


def nvmlDeviceSetCpuAffinity(handle):
    """All cores are as near."""
