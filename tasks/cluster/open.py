"""Opens the cluster that a configuration names: in goes the setting, out comes a scheduler address."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from conf.schema import Cluster
from tasks.cluster.local import open_local


@contextmanager
def open_cluster(settings: Cluster, num_ranks: int) -> Iterator[str]:
    """Yield the address of a scheduler with at least `num_ranks` workers.

    Args:
        settings: which kind, and how large.
        num_ranks: ranks that will each need a worker.
    """
    if settings.address is not None:
        yield settings.address  # it belongs to somebody else: joined, never ended
        return
    with open_local(settings, num_ranks) as address:
        yield address
