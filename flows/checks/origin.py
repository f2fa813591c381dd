"""Restricts the clusters that a run may join: never one that only a form of Prefect or the store names.

Dask executes what a scheduler sends. Anyone may write parameters of Prefect's API and stored configurations. So only
the local user's command line and environment choose the address of a scheduler, or turn TLS off.
"""

import os
import sys
from typing import Any

from paceline.conf.cluster import Cluster
from paceline.conf.environment import Environment
from paceline.tasks.errors import InputError

FLOW_RUN = "PREFECT__FLOW_RUN_ID"  # variable that Prefect's runners and workers set in the process of each flow run


def is_from_api() -> bool:
    """Return whether the parameters of this process's flow came from Prefect's API, and not from a caller."""
    if FLOW_RUN in os.environ:
        return True
    context: Any = sys.modules.get("prefect.context")  # before its import, no flow runs here
    flow = context and context.FlowRunContext.get()
    return bool(flow and flow.flow_run and flow.flow_run.deployment_id)


def check_origin(cluster: Cluster, environment: Environment) -> None:
    """Raise InputError for a scheduler, or a cluster without TLS, that only Prefect's API names."""
    if not is_from_api():
        return
    if cluster.address is not None and cluster.address != environment.scheduler:
        raise InputError(
            f"cluster.address={cluster.address} is not the scheduler of this host "
            f"(PACELINE_SCHEDULER={environment.scheduler or ''}), and a run that Prefect starts joins no other; "
            "set PACELINE_SCHEDULER where the flows are started, or name that address"
        )
    if cluster.tls == "off" and environment.cluster_tls != "off":
        fault = "cluster.tls=off is not allowed on this host for a run that Prefect starts"
        raise InputError(f"{fault}; leave it auto, or set PACELINE_CLUSTER_TLS=off where the flows are started")


def allow(cluster: Cluster) -> None:
    """Let the flow runs that this process starts join the cluster that its command line names."""
    if cluster.address is not None:
        os.environ["PACELINE_SCHEDULER"] = cluster.address
    if cluster.tls == "off":
        os.environ["PACELINE_CLUSTER_TLS"] = cluster.tls
