"""A cluster on its way: opened and closed in a thread of its own, while its user does something else.

Knows nothing of what the cluster is for.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

from conf.environment import Site
from conf.cluster import Cluster
from tasks.cluster.resources import Demand
from tasks.cluster.start import open_cluster


class Opening:
    """Begins to open a cluster.

    Args:
        settings: which kind, and how large.
        demand: what the ranks will need.
        site: this machine's facts.
        prepare: called with the address once the cluster is there; nobody waits for it.
    """

    def __init__(self, settings: Cluster, demand: Demand, site: Site, prepare: Callable[[str], None]) -> None:
        import distributed  # noqa: F401  in this thread: two that import parts of one package may get half of it

        self._stack = ExitStack()
        self._thread = ThreadPoolExecutor(1, "cluster")
        opened = open_cluster(settings, demand, site)
        self._address: Future[str] = self._thread.submit(self._stack.enter_context, opened)
        self._thread.submit(lambda: prepare(self.address()))
        self._closed: Future[None] | None = None

    def address(self) -> str:
        """Of the scheduler, once it is there.

        Raises:
            RunError: the workers did not come.
        """
        return self._address.result()

    def release(self) -> None:
        """Begin to close it: nobody needs it any more."""
        if self._closed is None:
            self._closed = self._thread.submit(self._stack.close)

    def close(self) -> None:
        """Close it, and wait until it is."""
        self.release()
        assert self._closed is not None
        self._thread.shutdown()
        self._closed.result()
