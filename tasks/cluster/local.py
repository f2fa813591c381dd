"""A Dask cluster on this machine for the time of one run: plain workers, or one worker per GPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from paceline.conf.cluster import Cluster
from paceline.tasks.cluster.client import ClusterResources
from paceline.tasks.cluster.gpu_workers import PRELOAD
from paceline.tasks.cluster.hardware import describe, usable_cores
from paceline.tasks.cluster.tls import register_security
from paceline.tasks.errors import InputError
from paceline.tasks.records.hardware import Gpu

if TYPE_CHECKING:
    from distributed import Security

QUIET_HTTP = {"dashboard": False, "dashboard_address": "127.0.0.1:0"}
"""Schedulers serve HTTP, without TLS, in any case: on loopback alone, on any free port."""


def num_local_workers(settings: Cluster, demand: ClusterResources) -> int:
    """Workers to start: the setting, or one per core and at least one per rank."""
    return max(usable_cores(), demand.num_workers) if settings.num_workers == "auto" else settings.num_workers


def local_arguments(num_workers: int, security: Security | None) -> dict[str, Any]:
    """Arguments of Dask's `LocalCluster`."""
    return {
        "n_workers": num_workers,
        "threads_per_worker": 1,
        "processes": True,
        "host": "127.0.0.1",
        "protocol": "tls://" if security else "tcp://",
        "security": security,
        "dashboard_address": None,
        "scheduler_kwargs": QUIET_HTTP,
        "silence_logs": logging.ERROR,
    }


def local_cuda_arguments(gpus: Sequence[Gpu], demand: ClusterResources, security: Security | None) -> dict[str, Any]:
    """Arguments of Dask's `LocalCluster`: a worker for each of the first GPUs. Raises InputError: there are too few."""
    if len(gpus) < demand.workers_per_host:
        setting = f"execution.num_devices={demand.workers_per_host} and cluster.kind=local_cuda"
        fault = f"{setting}, and this host has {len(gpus)} GPUs that NVML sees and torch is built for"
        raise InputError(f"{fault}; use fewer devices or another kind")
    return local_arguments(demand.workers_per_host, security) | PRELOAD


@contextmanager
def open_local(settings: Cluster, demand: ClusterResources, security: Security | None) -> Iterator[str]:
    """Start workers on loopback and yield the scheduler's address; end them afterwards."""
    from distributed import LocalCluster

    if settings.kind == "local_cuda":
        arguments = local_cuda_arguments(describe().gpus, demand, security)
    else:
        arguments = local_arguments(num_local_workers(settings, demand), security)
    with LocalCluster(**arguments) as cluster, register_security(cluster.scheduler_address, security):
        yield cluster.scheduler_address
