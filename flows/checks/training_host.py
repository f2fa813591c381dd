"""Hardware of the first training host before a cluster starts; refuses clusters that cannot start.

Starts nothing: it queries hosts over SSH, and lets Slurm validate the job script.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from paceline.conf.config import Config
from paceline.conf.environment import Environment
from paceline.flows.checks.origin import check_origin
from paceline.tasks.cluster import hardware
from paceline.tasks.cluster.host_report import HostFacts
from paceline.tasks.cluster.resources import ClusterResources, demand_of
from paceline.tasks.cluster.slurm import asked_host, check_slurm, job_script
from paceline.tasks.cluster.ssh import ask_hosts
from paceline.tasks.cluster.start import slurm_logs
from paceline.tasks.cluster.tls import certificate_paths, certificates, choose_tls
from paceline.tasks.errors import InputError
from paceline.tasks.host import has_compiler
from paceline.tasks.records import Hardware
from paceline.tasks.train.launch.placement import inspect


def training_host(config: Config, environment: Environment) -> Hardware:
    """Hardware of the first training host; of a Slurm node, the requested hardware.

    Raises:
        InputError: the cluster may not be joined, cannot be started, does not answer, or is too small.
    """
    check_origin(config.cluster, environment)
    credentials = certificates(config.cluster, environment)
    match config.cluster.kind:
        case "ssh":
            _require_module("asyncssh", "ssh")
            return _first_of(config, ask_hosts(config.cluster, credentials))
        case "slurm":
            _require_module("dask_jobqueue", "slurm")
            check_slurm(config.cluster, slurm_script(config, environment))
            return asked_host(config.cluster, _slurm_demand(config))
        case "address":
            assert config.cluster.address is not None
            return inspect(config, config.cluster.address)
        case _:
            return _this_host(config)


def slurm_script(config: Config, environment: Environment) -> str:
    """The script of each Slurm job; needs neither Slurm nor certificates."""
    secured = choose_tls(config.cluster).value == "on"
    return job_script(
        config.cluster,
        _slurm_demand(config),
        certificate_paths(environment) if secured else None,
        slurm_logs(environment),
    )


def _slurm_demand(config: Config) -> ClusterResources:
    return demand_of([config.execution], "gpu" if config.execution.accelerator == "gpu" else "cpu")


def _first_of(config: Config, hosts: Sequence[HostFacts]) -> Hardware:
    """Check that every host has what the workers need, and return the hardware of the first one."""
    first = hosts[0].hardware
    if config.execution.accelerator == "cpu" or not first.gpus:
        return first
    for name, host in zip(config.cluster.hosts, hosts, strict=True):
        if not host.has_dask_cuda:
            raise InputError(
                f"cluster.hosts: {name} lacks dask-cuda, which starts the workers of GPUs; "
                "install paceline[cuda] there, or set execution.accelerator=cpu"
            )
        if len(host.hardware.gpus) < config.execution.num_devices:
            raise InputError(
                f"execution.num_devices={config.execution.num_devices} exceeds the {len(host.hardware.gpus)} GPUs of "
                f"{name}; every host of cluster.hosts needs as many"
            )
    return first


def _this_host(config: Config) -> Hardware:
    facts = hardware.describe()
    kind = config.cluster.kind
    if config.execution.num_nodes > 1:
        raise InputError(
            f"execution.num_nodes={config.execution.num_nodes} and cluster.kind={kind}, which is this host alone; "
            "use num_nodes=1 or cluster.kind=ssh, slurm or address"
        )
    if kind == "local_cuda" and not facts.gpus:
        raise InputError(
            f"cluster.kind=local_cuda, and {facts.host} has no GPU that NVML sees and torch is built for; "
            "use cluster.kind=local"
        )
    if kind == "local_cuda":
        _require_module("dask_cuda", "cuda")
    workers = config.cluster.num_workers
    if workers != "auto" and workers < config.execution.num_devices:
        raise InputError(
            f"cluster.num_workers={workers} is below execution.num_devices={config.execution.num_devices}; "
            "each rank needs its own worker: raise num_workers or leave it auto"
        )
    if config.execution.compile == "step" and not has_compiler():
        raise InputError(
            "execution.compile=step needs a C++ compiler on CPUs, and this machine has none; "
            "install one (apt-get install g++) or use execution.compile=off"
        )
    return facts


def _require_module(module: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise InputError(
            f"cluster.kind needs the module {module}, which is not installed; pip install 'paceline[{extra}]'"
        )
