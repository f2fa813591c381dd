"""The host that will train first, as far as it is known before a cluster is started. Starts nothing."""

from __future__ import annotations

from paceline.conf.config import Config
from paceline.conf.environment import Environment
from paceline.flows.checks.origin import check_origin
from paceline.tasks.cluster.kinds import kind_of
from paceline.tasks.cluster.tls import certificates
from paceline.tasks.records import Hardware
from paceline.tasks.train.launch.placement import inspect


def training_host(config: Config, environment: Environment) -> Hardware:
    """Hardware of the first training host; of a Slurm node, the requested hardware.

    Raises:
        InputError: the cluster may not be joined, cannot be started, does not answer, or is too small.
    """
    check_origin(config.cluster, environment)
    certificates(config.cluster, environment)
    if config.cluster.address is not None:
        return inspect(config, config.cluster.address)
    kind = kind_of(config.cluster)
    kind.check()
    return kind.first_host(config, environment)
