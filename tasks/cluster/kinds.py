"""The kinds of clusters: one class for each, with its checks, its first host and how it is opened."""

# ruff: noqa: D102  overrides have the docstrings of `ClusterKind`

import importlib.util
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager

from paceline.conf.cluster import Cluster
from paceline.conf.config import Config
from paceline.conf.environment import Environment
from paceline.tasks.cluster import hardware, local, slurm, ssh
from paceline.tasks.cluster.client import ClusterResources, demand_of
from paceline.tasks.cluster.dask_config import low_overhead_config
from paceline.tasks.cluster.tls import certificate_paths, certificates, choose_tls, local_security
from paceline.tasks.errors import InputError
from paceline.tasks.host import has_compiler
from paceline.tasks.records.hardware import Hardware


class ClusterKind:
    """A kind of cluster that workers of a run come from."""

    module, extra = "", ""  # module that it needs, and the extra of the package that brings it
    has_known_hardware = True  # the hardware is known before the cluster is open
    shares_gpu = False  # all workers of a host take its first GPU

    def check(self) -> None:
        """Check that its module is installed. Raises InputError: it is not."""
        if self.module and importlib.util.find_spec(self.module) is None:
            fault = f"cluster.kind needs the module {self.module}, which is not installed"
            raise InputError(f"{fault}; pip install 'paceline[{self.extra}]'")

    def first_host(self, config: Config, site: Environment) -> Hardware:
        """Hardware of the first host that will train. Starts nothing.

        Raises InputError: the cluster cannot be started, does not answer, or is too small.
        """
        raise NotImplementedError

    def open(self, settings: Cluster, demand: ClusterResources, site: Environment) -> AbstractContextManager[str]:
        """Start the workers, yield the scheduler's address, end them. Raises RunError: the workers did not come."""
        raise NotImplementedError

    def num_hosts(self, config: Config) -> int:
        """Hosts that share the trials of a sweep."""
        return 1

    def job_script(self, config: Config, site: Environment) -> str:
        """The script of each job, for `--show`; empty for a kind without jobs."""
        return ""


class Local(ClusterKind):
    """Plain workers on this host."""

    shares_gpu = True

    def first_host(self, config: Config, site: Environment) -> Hardware:
        execution, workers = config.execution, config.cluster.num_workers
        if execution.num_nodes > 1:
            fault = f"execution.num_nodes={execution.num_nodes} and cluster.kind={config.cluster.kind}"
            remedy = "use num_nodes=1 or cluster.kind=ssh, slurm or address"
            raise InputError(f"{fault}, which is this host alone; {remedy}")
        if workers != "auto" and workers < execution.num_devices:
            fault = f"cluster.num_workers={workers} is below execution.num_devices={execution.num_devices}"
            raise InputError(f"{fault}; each rank needs a worker of its own: raise num_workers or leave it auto")
        if execution.compile == "step" and not has_compiler():
            fault = "execution.compile=step needs a C++ compiler on CPUs, and this host has none"
            raise InputError(f"{fault}; install one (apt-get install g++) or use execution.compile=off")
        return hardware.describe()

    def open(self, settings: Cluster, demand: ClusterResources, site: Environment) -> AbstractContextManager[str]:
        return local.open_local(settings, demand, local_security(settings, site))


class LocalCuda(Local):
    """One worker for each GPU of this host."""

    shares_gpu = False

    def check(self) -> None:
        if not hardware.describe().gpus:
            fault = "cluster.kind=local_cuda, and this host has no GPU that NVML sees and torch is built for"
            raise InputError(f"{fault}; use cluster.kind=local")


class Ssh(ClusterKind):
    """Workers on hosts that are reached by SSH."""

    module, extra = "asyncssh", "ssh"

    def first_host(self, config: Config, site: Environment) -> Hardware:
        hosts = [facts.hardware for facts in ssh.ask_hosts(config.cluster, certificates(config.cluster, site))]
        needed = config.execution.num_devices if config.execution.accelerator != "cpu" and hosts[0].gpus else 0
        for name, host in zip(config.cluster.hosts, hosts, strict=True):
            if len(host.gpus) < needed:
                fault = f"execution.num_devices={needed} exceeds the {len(host.gpus)} GPUs of {name}"
                raise InputError(f"{fault}; every host of cluster.hosts needs as many")
        return hosts[0]

    def open(self, settings: Cluster, demand: ClusterResources, site: Environment) -> AbstractContextManager[str]:
        return ssh.open_ssh(settings, demand, certificates(settings, site))

    def num_hosts(self, config: Config) -> int:
        return len(config.cluster.hosts)


class Slurm(ClusterKind):
    """One Slurm job for each host."""

    module, extra = "dask_jobqueue", "slurm"
    has_known_hardware = False

    def first_host(self, config: Config, site: Environment) -> Hardware:
        slurm.check_slurm(config.cluster, self.job_script(config, site))
        return slurm.requested_host(config.cluster, _demand(config))

    def open(self, settings: Cluster, demand: ClusterResources, site: Environment) -> AbstractContextManager[str]:
        return slurm.open_slurm(settings, demand, certificates(settings, site), site.root / "slurm")

    def num_hosts(self, config: Config) -> int:
        return config.execution.num_nodes

    def job_script(self, config: Config, site: Environment) -> str:
        """The script of each job; needs no Slurm, and no certificates yet."""
        files = certificate_paths(site) if choose_tls(config.cluster).value == "on" else None
        return slurm.job_script(config.cluster, _demand(config), files, site.root / "slurm")


def _demand(config: Config) -> ClusterResources:
    return demand_of([config.execution], "gpu" if config.execution.accelerator == "gpu" else "cpu")


class Address(ClusterKind):
    """A running cluster. It is joined, never started or ended, and its workers describe its hardware."""


KINDS: dict[str, ClusterKind] = {
    "local": Local(),
    "local_cuda": LocalCuda(),
    "ssh": Ssh(),
    "slurm": Slurm(),
    "address": Address(),
}


def kind_of(settings: Cluster) -> ClusterKind:
    """The kind that the settings name."""
    return KINDS[settings.kind]


@contextmanager
def open_cluster(
    settings: Cluster, demand: ClusterResources, site: Environment | None = None, *, pauses: bool = False
) -> Iterator[str]:
    """Yield the address of a scheduler with the workers that are demanded; end what was started afterwards.

    A cluster that `pauses` does not restart workers that have sent no sign of life for minutes.

    Raises InputError: there are no certificates, and the cluster needs them; RunError: the workers did not come.
    """
    if settings.address is not None:
        yield settings.address  # somebody else's cluster: joined, never ended
        return
    import dask
    import distributed  # noqa: F401  its defaults must be there before they are overruled, or they go with what overrules

    logging.getLogger("distributed").setLevel(logging.WARNING)  # Prefect raises it to INFO
    site = site or Environment()
    changes = low_overhead_config() | ({"distributed.scheduler.worker-ttl": None} if pauses else {})
    with dask.config.set(changes), kind_of(settings).open(settings, demand, site) as address:
        yield address


class Opening:
    """Opens a cluster in the background, then calls `prepare` with its address; nobody waits for that call."""

    def __init__(
        self,
        settings: Cluster,
        demand: ClusterResources,
        site: Environment,
        prepare: Callable[[str], None],
        *,
        pauses: bool = False,
    ) -> None:
        import distributed  # noqa: F401  in this thread: two that import parts of one package may get half of it

        self._stack, self._thread = ExitStack(), ThreadPoolExecutor(1, "cluster")
        opened = open_cluster(settings, demand, site, pauses=pauses)
        self._address: Future[str] = self._thread.submit(self._stack.enter_context, opened)
        self.prepared = self._thread.submit(lambda: prepare(self.address()))
        self._closed: Future[None] | None = None

    def address(self) -> str:
        """Wait for the cluster and return the scheduler's address. Raises RunError: the workers did not come."""
        return self._address.result()

    def release(self) -> None:
        """Start to close it, without waiting."""
        self._closed = self._closed or self._thread.submit(self._stack.close)

    def close(self) -> None:
        """Close it, and wait until it is."""
        self.release()
        assert self._closed is not None
        self._thread.shutdown()
        self._closed.result()
