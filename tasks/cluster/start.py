"""Opens the cluster that a configuration names, and yields the address of its scheduler."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

from paceline.conf.cluster import Cluster
from paceline.conf.environment import Environment
from paceline.tasks.cluster.dask_config import low_overhead_config
from paceline.tasks.cluster.kinds import kind_of
from paceline.tasks.cluster.resources import ClusterResources


@contextmanager
def open_cluster(settings: Cluster, demand: ClusterResources, site: Environment | None = None) -> Iterator[str]:
    """Yield the address of a scheduler with the workers that are demanded; end what was started afterwards.

    Args:
        settings: which kind, and how large.
        demand: what the ranks will need.
        site: this machine's facts; where certificates and logs lie.

    Raises:
        InputError: there are no certificates, and the cluster needs them.
        RunError: the workers did not come.
    """
    if settings.address is not None:
        yield settings.address  # somebody else's cluster: joined, never ended
        return
    import dask
    import distributed  # noqa: F401  its defaults must be there before they are overruled, or they go with what overrules

    with (
        dask.config.set(low_overhead_config()),
        kind_of(settings).open(settings, demand, site or Environment()) as address,
    ):
        yield address


class Opening:
    """Opens a cluster in the background.

    Args:
        settings: which kind, and how large.
        demand: what the ranks will need.
        site: this machine's facts.
        prepare: called with the address once the cluster is there; nobody waits for it.
    """

    def __init__(
        self, settings: Cluster, demand: ClusterResources, site: Environment, prepare: Callable[[str], None]
    ) -> None:
        import distributed  # noqa: F401  in this thread: two that import parts of one package may get half of it

        self._stack = ExitStack()
        self._thread = ThreadPoolExecutor(1, "cluster")
        opened = open_cluster(settings, demand, site)
        self._address: Future[str] = self._thread.submit(self._stack.enter_context, opened)
        self._thread.submit(lambda: prepare(self.address()))
        self._closed: Future[None] | None = None

    def address(self) -> str:
        """Wait for the cluster and return the scheduler's address. Raises RunError: the workers did not come."""
        return self._address.result()

    def release(self) -> None:
        """Start to close it, without waiting."""
        if self._closed is None:
            self._closed = self._thread.submit(self._stack.close)

    def close(self) -> None:
        """Close it, and wait until it is."""
        self.release()
        assert self._closed is not None
        self._thread.shutdown()
        self._closed.result()
