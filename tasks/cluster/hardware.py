"""The hardware of a host, detected in milliseconds, without importing torch."""

import hashlib
import importlib.util
import os
import platform
import re
import socket
from functools import cache
from pathlib import Path

import psutil

from paceline.tasks.errors import InputError
from paceline.tasks.records.hardware import Gpu, Hardware

CPU_INFO = Path("/proc/cpuinfo")


def describe() -> Hardware:
    """Describe the host this is called on."""
    fields = _cpu_fields()
    flags = set(fields.get("flags", "").split())
    return Hardware(
        host=socket.gethostname(),
        cpu_name=fields.get("model name", platform.processor() or platform.machine()),
        num_cores=usable_cores(),
        memory_bytes=psutil.virtual_memory().total,
        cpu_bf16=bool(flags & {"avx512_bf16", "amx_bf16"}),
        gpus=_gpus(),
    )


def usable_cores() -> int:
    """Cores this process may run on: affinity counts, so that a container or a batch job is respected."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def cpu_kind() -> str:
    """8 hex digits over what this host's CPU can do: cached machine code fits one kind only."""
    flags = " ".join(sorted(_cpu_fields().get("flags", "").split()))
    return hashlib.sha256(f"{platform.machine()} {flags}".encode()).hexdigest()[:8]


def _cpu_fields() -> dict[str, str]:
    if not CPU_INFO.exists():
        return {}
    first = CPU_INFO.read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0]
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _gpus() -> tuple[Gpu, ...]:
    import pynvml  # only needed here; costs nothing where there is no driver

    if not torch_has_cuda():
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()  # no driver, so no GPU that could be used
    try:
        gpus = [_describe_gpu(index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()
    return visible(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible(found: list[Gpu], setting: str | None) -> tuple[Gpu, ...]:
    """The GPUs that `CUDA_VISIBLE_DEVICES` leaves, which NVML does not heed; never in the rotated order of a worker.

    Raises:
        InputError: it names parts of GPUs.
    """
    if setting is None:
        return tuple(found)
    names = [name.strip() for name in setting.split(",") if name.strip()]
    if any(name.startswith("MIG") for name in names):
        raise InputError(
            f"CUDA_VISIBLE_DEVICES={setting}: instances of a divided GPU (MIG) are not supported; give whole GPUs, or "
            "an empty value to train on the CPU"
        )
    uuids = {gpu.uuid for gpu in found}
    # CUDA takes the beginning of a UUID for it, too.
    beginnings = tuple(name for name in names if name.startswith("GPU-") and name not in uuids)
    return tuple(
        gpu
        for index, gpu in enumerate(found)
        if str(index) in names or gpu.uuid in names or (beginnings and gpu.uuid.startswith(beginnings))
    )


@cache
def torch_has_cuda() -> bool:
    """Whether the installed torch is built for CUDA, by its version file: importing torch takes a second."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    return re.search(r"^cuda\b[^=]*=\s*['\"]", text, re.MULTILINE) is not None


def _describe_gpu(index: int) -> Gpu:
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        name=pynvml.nvmlDeviceGetName(handle),
        memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
        compute_capability=(major, minor),
    )
