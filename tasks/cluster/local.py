"""A Dask cluster on this machine for the time of one run: one single-threaded worker process per core or rank."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from conf.schema import Cluster
from tasks.cluster.hardware import usable_cores


def num_local_workers(settings: Cluster, num_ranks: int) -> int:
    """Workers to start: as told, else one per core and at least one per rank."""
    if settings.num_workers != "auto":
        return settings.num_workers
    return max(usable_cores(), num_ranks)


@contextmanager
def open_local(settings: Cluster, num_ranks: int) -> Iterator[str]:
    """Start the workers on loopback and yield the scheduler's address; end them afterwards."""
    from distributed import LocalCluster

    logging.getLogger("distributed").setLevel(logging.WARNING)  # Prefect raises it to INFO
    with LocalCluster(
        n_workers=num_local_workers(settings, num_ranks),
        threads_per_worker=1,
        processes=True,
        host="127.0.0.1",
        dashboard_address=None,
        silence_logs=logging.ERROR,
    ) as cluster:
        yield cluster.scheduler_address
