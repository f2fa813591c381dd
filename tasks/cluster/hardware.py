"""The hardware of a host, detected in milliseconds, without importing torch."""

import contextlib
import hashlib
import importlib.util
import os
import platform
import re
import socket
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from paceline.tasks.errors import InputError
from paceline.tasks.records.hardware import Gpu, Hardware

CPU_INFO = Path("/proc/cpuinfo")
CPUS = Path("/sys/devices/system/cpu")


def describe() -> Hardware:
    """Describe the host this is called on."""
    fields, cores = _cpu_fields(), _usable()
    return Hardware(
        host=socket.gethostname(),
        cpu_name=fields.get("model name", platform.processor() or platform.machine()),
        num_cores=len(cores),
        num_physical_cores=count_physical_cores(cores),
        memory_bytes=psutil.virtual_memory().total,
        cpu_bf16=not {"avx512_bf16", "amx_bf16"}.isdisjoint(fields.get("flags", "").split()),
        gpus=_gpus(),
    )


def usable_cores() -> int:
    """Cores this process may run on: affinity counts, so that a container or a batch job is respected."""
    return len(_usable())


def _usable() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def count_physical_cores(cores: Iterable[int], directory: Path = CPUS) -> int | None:
    """How many physical cores have these logical ones; None if the system does not say."""
    try:
        return len({(directory / f"cpu{core}/topology/thread_siblings_list").read_text() for core in cores}) or None
    except OSError:
        return None


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
        boards = [_describe_board(index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()
    return visible(boards, os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible(boards: Sequence[Sequence[Gpu]], setting: str | None) -> tuple[Gpu, ...]:
    """The GPUs that `CUDA_VISIBLE_DEVICES` leaves, which NVML does not heed; never in the rotated order of a worker.

    A board has one GPU, or its slices, for which its number or UUID stands. Raises InputError: slices are named by
    the instances of their boards.
    """
    numbered = [(str(index), gpu) for index, board in enumerate(boards) for gpu in board]
    if setting is None:
        return tuple(gpu for _, gpu in numbered)
    names = [name.strip() for name in setting.split(",") if name.strip()]
    if any(name.startswith("MIG-GPU-") for name in names):
        fault = f"CUDA_VISIBLE_DEVICES={setting}: slices of a divided GPU (MIG) are named by their instances"
        remedy = "use their UUIDs, MIG-..., which `nvidia-smi -L` prints, or an empty value to train on the CPU"
        raise InputError(f"{fault}; {remedy}")
    uuids = {uuid for _, gpu in numbered for uuid in (gpu.uuid, gpu.board) if uuid is not None}
    # CUDA takes the beginning of a UUID for it, too.
    beginnings = tuple(name for name in names if name.startswith(("GPU-", "MIG-")) and name not in uuids)
    named = {uuid for uuid in uuids if uuid in names or uuid.startswith(beginnings)}
    return tuple(gpu for index, gpu in numbered if index in names or gpu.uuid in named or gpu.board in named)


@cache
def torch_has_cuda() -> bool:
    """Whether the installed torch is built for CUDA, by its version file: importing torch takes a second."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    return re.search(r"^cuda\b[^=]*=\s*['\"]", text, re.MULTILINE) is not None


def _describe_board(index: int) -> list[Gpu]:
    """The GPU of a board, or its slices if it is divided (MIG); CUDA cannot use a divided GPU without slices."""
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    is_divided = False
    with contextlib.suppress(pynvml.NVMLError):  # of a board that cannot be divided
        is_divided = pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    if not is_divided:
        return [_describe_gpu(handle, handle)]
    slices = []
    for number in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with contextlib.suppress(pynvml.NVMLError):  # no slice has that number
            slices.append(_describe_gpu(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number), handle))
    return slices


def _describe_gpu(handle: Any, board: Any) -> Gpu:
    import pynvml

    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        name=pynvml.nvmlDeviceGetName(handle),
        memory_bytes=int(memory.total),
        free_bytes=int(memory.free),
        compute_capability=tuple(pynvml.nvmlDeviceGetCudaComputeCapability(board)),
        board=None if handle is board else pynvml.nvmlDeviceGetUUID(board),
    )
