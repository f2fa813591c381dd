"""The kinds of clusters: one class for each, with its checks, its first host and how it is opened."""

# ruff: noqa: D102  overrides have the docstrings of `ClusterKind`

import importlib.util
from contextlib import AbstractContextManager

from paceline.conf.cluster import Cluster
from paceline.conf.config import Config
from paceline.conf.environment import Environment
from paceline.tasks.cluster import hardware, local, slurm, ssh
from paceline.tasks.cluster.resources import ClusterResources, demand_of
from paceline.tasks.cluster.tls import certificate_paths, certificates, choose_tls, local_security
from paceline.tasks.errors import InputError
from paceline.tasks.host import has_compiler
from paceline.tasks.records.hardware import Hardware


class ClusterKind:
    """A kind of cluster that workers of a run come from."""

    module = ""  # module that it needs, of an extra of the package
    extra = ""
    has_known_hardware = True  # the hardware is known before the cluster is open
    shares_gpu = False  # all workers of a host take its first GPU

    def check(self) -> None:
        """Check that its module is installed. Raises InputError: it is not."""
        if self.module and importlib.util.find_spec(self.module) is None:
            raise InputError(
                f"cluster.kind needs the module {self.module}, which is not installed; "
                f"pip install 'paceline[{self.extra}]'"
            )

    def first_host(self, config: Config, site: Environment) -> Hardware:
        """Hardware of the first host that will train. Starts nothing.

        Raises:
            InputError: the cluster cannot be started, does not answer, or is too small.
        """
        raise NotImplementedError

    def open(self, settings: Cluster, demand: ClusterResources, site: Environment) -> AbstractContextManager[str]:
        """Start the workers and yield the scheduler's address; end them afterwards.

        Raises:
            RunError: the workers did not come.
        """
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
        if config.execution.num_nodes > 1:
            raise InputError(
                f"execution.num_nodes={config.execution.num_nodes} and cluster.kind={config.cluster.kind}, which is "
                "this host alone; use num_nodes=1 or cluster.kind=ssh, slurm or address"
            )
        workers = config.cluster.num_workers
        if workers != "auto" and workers < config.execution.num_devices:
            raise InputError(
                f"cluster.num_workers={workers} is below execution.num_devices={config.execution.num_devices}; "
                "each rank needs a worker of its own: raise num_workers or leave it auto"
            )
        if config.execution.compile == "step" and not has_compiler():
            raise InputError(
                "execution.compile=step needs a C++ compiler on CPUs, and this host has none; "
                "install one (apt-get install g++) or use execution.compile=off"
            )
        return hardware.describe()

    def open(self, settings: Cluster, demand: ClusterResources, site: Environment) -> AbstractContextManager[str]:
        return local.open_local(settings, demand, local_security(settings, site))


class LocalCuda(Local):
    """One worker for each GPU of this host."""

    shares_gpu = False

    def check(self) -> None:
        if not hardware.describe().gpus:
            raise InputError(
                "cluster.kind=local_cuda, and this host has no GPU that NVML sees and torch is built for; "
                "use cluster.kind=local"
            )


class Ssh(ClusterKind):
    """Workers on hosts that are reached by SSH."""

    module, extra = "asyncssh", "ssh"

    def first_host(self, config: Config, site: Environment) -> Hardware:
        answers = ssh.ask_hosts(config.cluster, certificates(config.cluster, site))
        first = answers[0].hardware
        needed = config.execution.num_devices if config.execution.accelerator != "cpu" and first.gpus else 0
        for name, host in zip(config.cluster.hosts, answers, strict=True):
            if len(host.hardware.gpus) < needed:
                raise InputError(
                    f"execution.num_devices={needed} exceeds the {len(host.hardware.gpus)} GPUs of {name}; every host "
                    "of cluster.hosts needs as many"
                )
        return first

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
        secured = choose_tls(config.cluster).value == "on"
        files = certificate_paths(site) if secured else None
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
