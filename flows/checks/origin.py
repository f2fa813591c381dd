"""Restricts the clusters that a run may join, and the code that it imports, where only Prefect or the store names them.

Dask executes what a scheduler sends. Anyone may write parameters of Prefect's API and stored configurations. So only
the local user's command line and environment choose the address of a scheduler, turn TLS off, or name own code.
"""

import os
import sys
from pathlib import Path
from typing import Any

from paceline.conf.cluster import Cluster
from paceline.conf.environment import Environment
from paceline.conf.lightning import Lightning
from paceline.tasks.errors import InputError
from paceline.tasks.train.lightning.code import package_names, possible_imports

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


def check_code(own: Lightning, environment: Environment) -> None:
    """Raise InputError for own Lightning code that only Prefect's API names."""
    if not is_from_api():
        return
    allowed = environment.code_given.split(",")
    if own.code is not None and Path(own.code).resolve().is_relative_to((environment.root / "runs").resolve()):
        allowed.append(_listed(own.code))  # the copy of a run
    foreign = [name for name in _sources(own) if _listed(name) not in allowed]
    if foreign:
        fault = f"{foreign[0]} is not code that a run which Prefect starts may import on this host"
        given = ",".join(filter(None, [environment.code_given, *map(_listed, foreign)]))
        raise InputError(fault, hint=f"where the flows are started, export PACELINE_CODE={given}", setting="lightning")


def _listed(name: str) -> str:
    """A directory or package in PACELINE_CODE, which has commas between them."""
    return name.replace(",", "%2C")


def _sources(own: Lightning) -> tuple[str, ...]:
    """The directory of own code, and the packages of its other classes."""
    if own.code is None:
        return package_names(own.settings, None, possible_imports)
    place = Path(own.code)
    return (own.code, *(package_names(own.settings, place, possible_imports) if place.is_dir() else ()))


def allow(cluster: Cluster, own: Lightning | None = None) -> None:
    """Let the flow runs that this process starts join the cluster, and import the code, that its command line names."""
    if own is not None and own.settings:
        os.environ["PACELINE_CODE"] = ",".join(map(_listed, _sources(own)))
    if cluster.address is not None:
        os.environ["PACELINE_SCHEDULER"] = cluster.address
    if cluster.tls == "off":
        os.environ["PACELINE_CLUSTER_TLS"] = cluster.tls
