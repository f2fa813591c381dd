"""Limit of a device, measured in the process that uses it: the best rates of matrix products and of a copy.

The product of two matrices of n x n counts as 2 n^3 floating-point operations. A copy counts its bytes twice, because
they are read and written. Each rate is the best of several repeats after warm-up, which no short disturbance lowers.
"""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from paceline.tasks.cluster.hardware import cpu_kind, describe
from paceline.tasks.files import MeasurementCache
from paceline.tasks.measure.gpu import nvml, read_nvml
from paceline.tasks.records.hardware import DeviceLimit

LIMIT_SECONDS = 2.0
MIN_REPEATS = 3
REPEAT_SECONDS = 0.01  # shortest repeat: the clock and the start of kernels are then below a thousandth of it
MIN_SIZE = 256  # rows of the smallest matrices
MAX_SIZE = {"cpu": 2048, "cuda": 8192}
SIZE_SHARE = 0.1  # part of a precision's time that one product may take
COPY_BYTES = 128 * 2**20  # of each buffer: above the caches of most devices
DTYPES = {
    **{"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16, "64-true": torch.float64},
    **{"32-true": torch.float32, "tf32": torch.float32},
}
TF32_CAPABILITY = (8, 0)


def limit_cache(home: Path, device: torch.device) -> MeasurementCache[DeviceLimit]:
    """The cached limit of this device, with its driver, this torch and this number of threads."""
    facts = {"limit": 1, "device": _device_name(device), "driver": _driver(device), "torch": torch.__version__}
    if device.type == "cpu":
        facts |= {"cpu": cpu_kind(), "threads": torch.get_num_threads()}
    return MeasurementCache(home, facts, DeviceLimit)


def measure_limit(
    device: torch.device, precisions: Collection[str] = (), seconds: float = LIMIT_SECONDS
) -> DeviceLimit:
    """Measure the rates of a device, on the current number of threads.

    Nothing else should run on it. `precisions` are measured next to the usual ones: fp32 and bf16, on a GPU also fp16,
    and TF32 where it has that. `seconds` are for all rates together, after warm-up.

    Raises RuntimeError: not even small matrices fit, or the device fails.
    """
    started = time.perf_counter()
    usual = ["32-true", "bf16-mixed"]
    if device.type == "cuda":
        usual += ["16-mixed", "tf32"][: 2 if torch.cuda.get_device_capability(device) >= TF32_CAPABILITY else 1]
    names = list(dict.fromkeys([*usual, *precisions]))
    share = seconds / (len(names) + 1)
    rates = {name: _product_rate(device, name, share) for name in names}
    bytes_per_second = _copy_rate(device, share)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # for what comes after
    return DeviceLimit(
        device_name=_device_name(device),
        driver=_driver(device),
        torch=torch.__version__,
        num_threads=torch.get_num_threads() if device.type == "cpu" else None,
        flops_per_second=rates,
        bytes_per_second=bytes_per_second,
        seconds=time.perf_counter() - started,
    )


def _product_rate(device: torch.device, precision: str, seconds: float) -> float:
    """Operations per second of the product of the largest matrices that memory and `seconds` allow."""
    size, dtype = MIN_SIZE, DTYPES[precision]
    with _fp32_products("tf32" if precision == "tf32" else "ieee", device):
        product = _product(size, dtype, device)
        single = best_seconds(product, device, 0.0)
        # Twice the rows are 8 times the operations.
        while size < MAX_SIZE[device.type] and 8 * single <= SIZE_SHARE * seconds:
            try:
                larger = _product(2 * size, dtype, device)
                single = best_seconds(larger, device, 0.0)
            except RuntimeError:  # no memory, by torch's own error or by one of cuBLAS
                break
            size, product = 2 * size, larger
        return float(2 * size**3 / best_seconds(product, device, seconds))


def _copy_rate(device: torch.device, seconds: float) -> float:
    """Bytes per second that a copy within the device's memory reads and writes."""
    source = torch.ones(COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / best_seconds(lambda: target.copy_(source), device, seconds)


def _product(size: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """The product of two matrices without structure: zeros would let a GPU draw less power and clock higher."""
    values = torch.arange(size * size, device=device, dtype=torch.float32).sin_()
    first = values.view(size, size).to(dtype)
    second = first.flip(0)
    result = torch.empty_like(first)
    return lambda: torch.mm(first, second, out=result)


def best_seconds(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Least seconds of `work`, over repeats for about `seconds` after a warm-up."""
    _time_repeat(work, device, 1)
    single = _time_repeat(work, device, 1)
    number, times, end = max(1, round(REPEAT_SECONDS / single)), [single], time.perf_counter() + seconds
    while time.perf_counter() < end or (seconds and len(times) <= MIN_REPEATS):
        times.append(_time_repeat(work, device, number) / number)
    return min(times)


def _time_repeat(work: Callable[[], object], device: torch.device, number: int) -> float:
    """Seconds of `number` calls; the host waits for the device once."""
    started = time.perf_counter()
    for _ in range(number):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


@contextmanager
def _fp32_products(arithmetic: str, device: torch.device) -> Iterator[None]:
    """Use this arithmetic in products of float32 matrices on a GPU: `ieee` or `tf32`."""
    if device.type == "cpu":
        yield
        return
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = arithmetic
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _device_name(device: torch.device) -> str:
    return describe().cpu_name if device.type == "cpu" else torch.cuda.get_device_name(device)


def _driver(device: torch.device) -> str | None:
    if device.type == "cpu":
        return None
    with nvml() as library:
        version = None if library is None else read_nvml(library.nvmlSystemGetDriverVersion)
    return version if version is None else str(version)
