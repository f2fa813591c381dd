"""A Dask cluster on this machine for the time of one run: plain workers, or one worker per GPU."""

from __future__ import annotations

import ast
import logging
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
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

LOOPBACK = "127.0.0.1"
NANNY_DEFAULTS, NANNY_VARIABLES = {"OPENBLAS_NUM_THREADS": "1"}, {"PYTHONHASHSEED": "6640"}
"""Variables that Dask's nannies set for workers; the first only if the user has not set it (distributed/nanny.py,
2026.7). Ranks set the other ones themselves. If Dask changes them, `start_fork_server` forks no ranks."""
QUIET_HTTP = {"dashboard": False, "dashboard_address": "127.0.0.1:0"}
"""Schedulers serve HTTP, without TLS, in any case: on loopback alone, on any free port."""


def num_local_workers(settings: Cluster, demand: ClusterResources) -> int:
    """Workers to start: the setting, or one per rank, and one per core to prepare data."""
    if settings.num_workers != "auto":
        return settings.num_workers
    return max(usable_cores(), demand.num_workers) if demand.prepares else demand.num_workers


def local_arguments(num_workers: int, security: Security | None) -> dict[str, Any]:
    """Arguments of Dask's `LocalCluster`."""
    return {
        "n_workers": num_workers,
        "threads_per_worker": 1,
        "processes": True,
        "host": LOOPBACK,
        "protocol": "tls://" if security else "tcp://",
        "security": security,
        "dashboard_address": None,
        "scheduler_kwargs": QUIET_HTTP,
        "silence_logs": logging.CRITICAL,  # Dask logs an error for each heartbeat that meets a cluster's end
    }


def local_cuda_arguments(gpus: Sequence[Gpu], demand: ClusterResources, security: Security | None) -> dict[str, Any]:
    """Arguments of Dask's `LocalCluster`: a worker for each of the first GPUs. Raises InputError: there are too few."""
    if len(gpus) < demand.workers_per_host:
        setting = f"execution.num_devices={demand.workers_per_host} and cluster.kind=local_cuda"
        fault = f"{setting}, and this host has {len(gpus)} GPUs that NVML sees and torch is built for"
        raise InputError(f"{fault}; use fewer devices or another kind")
    return local_arguments(demand.workers_per_host, security) | PRELOAD


def require_main_guard() -> None:
    """Raise InputError if a worker that imports the program's main module would arrive here as well."""
    path = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # a run may start its cluster in a thread
    frames = traceback.walk_stack(frame)
    modules = ((line, one) for one, line in frames if one.f_code.co_name == "<module>")
    line = next((line for line, one in modules if one.f_globals["__name__"] == "__main__"), 0)
    if not line or path.suffix != ".py" or not path.is_file():  # a console script, a notebook, standard input
        return
    for statement in ast.parse(path.read_bytes()).body:
        if statement.lineno <= line <= (statement.end_lineno or 0):
            if isinstance(statement, ast.If) and "'__name__'" in ast.dump(statement.test):
                return
            raise InputError(
                f'line {line} of {path.name} starts a run outside of `if __name__ == "__main__":`, and workers on this '
                "host import this file, so that each would start the run again",
                hint=f'put `if __name__ == "__main__":` before line {line} of {path.name}, and indent what follows',
            )


@contextmanager
def open_local(settings: Cluster, demand: ClusterResources, security: Security | None) -> Iterator[str]:
    """Start workers on loopback and yield the scheduler's address; end them afterwards.

    Raises InputError: workers would run the user's script again, and there are too few GPUs.
    """
    require_main_guard()
    from distributed import LocalCluster

    if settings.kind == "local_cuda":
        arguments = local_cuda_arguments(describe().gpus, demand, security)
    else:
        arguments = local_arguments(num_local_workers(settings, demand), security)
    with LocalCluster(**arguments) as cluster, register_security(cluster.scheduler_address, security):
        yield cluster.scheduler_address
