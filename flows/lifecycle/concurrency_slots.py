"""Repairs the slots of a deployment's concurrency limit, which Prefect 3.8.8 counts apart from their leases.

After a failure the two may differ: leases in memory are lost with the server, and a late run frees a slot twice.
"""

import time
from datetime import timedelta
from typing import NamedTuple
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import GlobalConcurrencyLimitUpdate
from prefect.client.schemas.filters import DeploymentFilter, FlowRunFilter
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.logging import get_logger
from prefect.states import Crashed
from prefect.types._datetime import now

HOLDING = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING]
PENDING_LIMIT = timedelta(minutes=15)
"""A run that is PENDING for longer has lost its process, which starts within seconds."""
SETTLE_SECONDS = 1.0
"""Interval of two readings that must agree: a run that starts or ends in between changes both counts."""


class LimitUse(NamedTuple):
    """The use of a concurrency limit."""

    name: str
    limit: int
    slots: int
    runs: frozenset[UUID]


def active_runs(client: SyncPrefectClient, deployment_id: UUID) -> list[FlowRun]:
    """A deployment's runs that hold a slot."""
    active = FlowRunFilter.model_validate({"state": {"type": {"any_": HOLDING}}})
    mine = DeploymentFilter.model_validate({"id": {"any_": [deployment_id]}})
    return client.read_flow_runs(flow_run_filter=active, deployment_filter=mine)


def set_slots_right(client: SyncPrefectClient, deployment_id: UUID, living: frozenset[UUID]) -> None:
    """Free the slots of a deployment without runs, and hold one for each run of `living`.

    Other runs may be alive on other hosts, or may have lost their slot with their lease.
    """
    for run in active_runs(client, deployment_id):
        if run.state and run.state.type == StateType.PENDING and run.state.timestamp < now("UTC") - PENDING_LIMIT:
            # Should its process be on its way all the same, Prefect lets it go from here to RUNNING.
            client.set_flow_run_state(run.id, Crashed(message=f"PENDING for {PENDING_LIMIT} without a process"))
    held = _read_limit(client, deployment_id)
    if held is None:
        return
    due = min(max(held.slots, len(held.runs & living)), len(held.runs), held.limit)
    if due == held.slots:
        return
    time.sleep(SETTLE_SECONDS)
    if _read_limit(client, deployment_id) != held:
        return
    client.update_global_concurrency_limit(held.name, GlobalConcurrencyLimitUpdate(active_slots=due))
    get_logger("paceline").warning("Prefect counted %d held slots of %s: set to %d", held.slots, held.name, due)


def _read_limit(client: SyncPrefectClient, deployment_id: UUID) -> LimitUse | None:
    limit = client.read_deployment(deployment_id).global_concurrency_limit
    if limit is None:
        return None
    runs = frozenset(run.id for run in active_runs(client, deployment_id))
    return LimitUse(limit.name, limit.limit, limit.active_slots, runs)
