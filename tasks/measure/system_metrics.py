"""The load of this machine while a training lasts, under the names that MLflow gives to system metrics.

The names and units of `mlflow.system_metrics`, which its UI shows on a page of their own; not its sampler, for that is
2 s of imports in a process that is about to train.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from paceline.tasks.measure.gpu import handles, read_nvml
from paceline.tasks.metrics_file import SYSTEM_METRIC_PREFIX

FIRST_SECONDS = 0.2  # that the first sample is of, unless the training ends sooner
FIRST_SAMPLES = 10
FIRST_SAMPLE_SECONDS = 1.0
SAMPLE_SECONDS = 10.0  # between samples, after the first ones, of which a short run has none other
MEGABYTE = 1e6

LogMetrics = Callable[[dict[str, float], int], None]


@contextmanager
def log_system_metrics(log: LogMetrics, gpu_uuids: tuple[str, ...]) -> Iterator[None]:
    """Sample while the body lasts, at least once."""
    ended = threading.Event()
    thread = threading.Thread(target=_sample, args=(log, gpu_uuids, ended), name="load", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _sample(log: LogMetrics, gpu_uuids: tuple[str, ...], ended: threading.Event) -> None:
    network = _network_megabytes()
    psutil.cpu_percent()  # each call measures the time since the one before
    ended.wait(FIRST_SECONDS)
    number = 0
    while True:
        log({SYSTEM_METRIC_PREFIX + name: round(value, 1) for name, value in _load(gpu_uuids, network).items()}, number)
        number += 1
        if ended.wait(FIRST_SAMPLE_SECONDS if number < FIRST_SAMPLES else SAMPLE_SECONDS):
            return


def _load(gpu_uuids: tuple[str, ...], network: dict[str, float]) -> dict[str, float]:
    """Of the whole host; the network's since its counters were `network`."""
    memory, disk = psutil.virtual_memory(), psutil.disk_usage(os.sep)
    metrics = {
        "cpu_utilization_percentage": psutil.cpu_percent(),
        "system_memory_usage_megabytes": memory.used / MEGABYTE,
        "system_memory_usage_percentage": memory.used / memory.total * 100,
        "disk_usage_percentage": disk.percent,
        "disk_usage_megabytes": disk.used / MEGABYTE,
        "disk_available_megabytes": disk.free / MEGABYTE,
    }
    metrics |= {name: value - network[name] for name, value in _network_megabytes().items()}
    with handles(gpu_uuids) as (library, boards):
        for board in boards.values():
            if (index := read_nvml(library.nvmlDeviceGetIndex, board)) is not None:
                metrics |= {f"gpu_{index}_{name}": value for name, value in _gpu_load(library, board).items()}
    return metrics


def _gpu_load(library: Any, board: Any) -> dict[str, float]:
    """Of one GPU, as far as its driver reports it."""
    figures: dict[str, float] = {}
    if (memory := read_nvml(library.nvmlDeviceGetMemoryInfo, board)) is not None:
        if memory.total:
            figures["memory_usage_percentage"] = memory.used / memory.total * 100
        figures["memory_usage_megabytes"] = memory.used / MEGABYTE
    if (rates := read_nvml(library.nvmlDeviceGetUtilizationRates, board)) is not None:
        figures["utilization_percentage"] = float(rates.gpu)
    if (milliwatts := read_nvml(library.nvmlDeviceGetPowerUsage, board)) is not None:
        figures["power_usage_watts"] = milliwatts / 1000
        if limit := read_nvml(library.nvmlDeviceGetEnforcedPowerLimit, board):
            figures["power_usage_percentage"] = milliwatts / limit * 100
    return figures


def _network_megabytes() -> dict[str, float]:
    counters = psutil.net_io_counters()
    if counters is None:  # a host without a network
        return {}
    return {
        "network_receive_megabytes": counters.bytes_recv / MEGABYTE,
        "network_transmit_megabytes": counters.bytes_sent / MEGABYTE,
    }
