"""This host: disk, devices and their drivers, compiler, ports, clocks."""

import os
import shutil
import socket
from importlib import metadata
from pathlib import Path

from paceline.tasks.cluster.hardware import describe, torch_has_cuda
from paceline.tasks.doctor.finding import Finding, bad, doubtful, good
from paceline.tasks.files import nearest_existing
from paceline.tasks.host import has_compiler
from paceline.tasks.records.hardware import Hardware

GIB = 2**30
LITTLE_BYTES = 10 * GIB  # free below which a warning is due: a prepared set and its checkpoints are of this order
NVIDIA = Path("/dev/nvidiactl")
SHARED_MEMORY = Path("/dev/shm")
GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")


def examine_host(home: Path, leases: Path, min_free_gib: float) -> list[Finding]:
    """Examine what needs neither a cluster nor a server."""
    hardware = describe()
    checks = [_devices(hardware), _drivers(), _compiler(), _place("state", home, "PACELINE_HOME", min_free_gib)]
    checks += [_place("leases", leases, "PACELINE_LEASES"), _ports(), _clocks()]
    return [*checks, _shared_memory()] if hardware.gpus else checks


def _devices(hardware: Hardware) -> Finding:
    bf16 = "with" if hardware.cpu_bf16 else "without"
    gpus = ", ".join(f"{gpu.name} ({gpu.memory_bytes / GIB:.0f} GiB)" for gpu in hardware.gpus) or "no GPU"
    memory = f"{hardware.memory_bytes / GIB:.0f} GiB"
    return good("devices", f"{hardware.num_cores} cores of {hardware.cpu_name} {bf16} bf16, {memory}; {gpus}")


def _drivers() -> Finding:
    if not NVIDIA.exists():
        return good("driver", "no NVIDIA driver, none needed")
    if not torch_has_cuda():
        remedy = "install torch from the index of your CUDA version"
        return bad("driver", "there are GPUs, and torch is built for CPUs", remedy)
    import pynvml

    try:
        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return bad("driver", f"NVML does not answer: {error}", "load the driver again, or restart the host")
    nccl = [package.version for package in metadata.distributions() if package.name.startswith("nvidia-nccl")]
    if not nccl:
        remedy = "install torch with CUDA by pip, which brings NCCL"
        return doubtful("driver", f"NVIDIA {version}, and no NCCL: several GPUs cannot train together", remedy)
    return good("driver", f"NVIDIA {version}, NCCL {nccl[0]}")


def _compiler() -> Finding:
    if has_compiler():
        return good("compiler", "there is one")
    fault = "no C++ compiler: execution.compile=step cannot be used on CPUs"
    return doubtful("compiler", fault, "install g++ or clang++")


def _place(check: str, path: Path, variable: str, min_free_gib: float = 0.0) -> Finding:
    existing = nearest_existing(path)
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return bad(check, f"{variable}={path} cannot be written", f"set {variable} to a directory of yours")
    free = shutil.disk_usage(existing).free
    if free < min_free_gib * GIB:
        fault = f"{path}: {free / GIB:.2f} GiB free, and limits.min_free_gib={min_free_gib:g}: runs are refused"
        return bad(check, fault, "paceline clean")
    if check == "state" and free < LITTLE_BYTES:
        remedy = f"call paceline clean, or set {variable} to a larger disk"
        return doubtful(check, f"{path}: {free / GIB:.1f} GiB free", remedy)
    return good(check, f"{path}: {free / GIB:.0f} GiB free")


def _ports() -> Finding:
    """Check the ports of ranks, schedulers and workers: any free one on loopback."""
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
            probe.listen()
            socket.create_connection(("127.0.0.1", port), timeout=2).close()
    except OSError as error:
        return bad("ports", f"loopback cannot be listened on: {error}", "allow TCP on 127.0.0.1")
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError as error:
        remedy = f"name {socket.gethostname()} in /etc/hosts"
        return doubtful("ports", f"this host's own name does not resolve ({error})", remedy)
    return good("ports", "loopback can be listened on, and this host's name resolves")


def _clocks() -> Finding:
    if not GOVERNOR.is_file():
        return good("core clocks", "set by the platform")
    governor = GOVERNOR.read_text(encoding="utf-8").strip()
    if governor == "performance":
        return good("core clocks", "governor performance")
    remedy = "for measurements: cpupower frequency-set -g performance"
    return doubtful("core clocks", f"governor {governor}: speeds will move with the load", remedy)


def _shared_memory() -> Finding:
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    if free < GIB:
        remedy = "give the container more, such as --shm-size=8g"
        return doubtful("shared memory", f"{free / GIB:.2f} GiB free in {SHARED_MEMORY}, which NCCL uses", remedy)
    return good("shared memory", f"{free / GIB:.0f} GiB free")
