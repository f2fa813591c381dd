"""Overlapping runs of a deployment: the policy `cancel-oldest`, and slots of Prefect's limits for the other policies.

Prefect 3.8.8 counts slots apart from their leases. After a failure the two may differ: leases in memory are lost with
the server, and a late run frees a slot twice.
"""

import time
from datetime import timedelta
from uuid import UUID

from prefect import get_run_logger
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitUpdate
from prefect.client.schemas.filters import DeploymentFilter, FlowRunFilter
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.logging import get_logger
from prefect.runtime import deployment, flow_run
from prefect.states import Cancelling, Crashed
from prefect.types._datetime import now

from paceline.flows.lifecycle.prefect_api import wait_for_api

POLICY_TAG = "overlap:"  # prefix of the tag that names a deployment's policy; its runs have the tag too
HOLDING = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING]
PENDING_LIMIT = timedelta(minutes=15)
"""A run that is PENDING for longer has lost its process, which starts within seconds."""
SETTLE_SECONDS = 1.0
"""Interval of two readings that must agree: a run that starts or ends in between changes both counts."""


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
    name, limit, slots, runs = held
    due = min(max(slots, len(runs & living)), len(runs), limit)
    if due == slots:
        return
    time.sleep(SETTLE_SECONDS)
    if _read_limit(client, deployment_id) != held:
        return
    client.update_global_concurrency_limit(name, GlobalConcurrencyLimitUpdate(active_slots=due))
    get_logger("paceline").warning("Prefect counted %d held slots of %s: set to %d", slots, name, due)


def _read_limit(client: SyncPrefectClient, deployment_id: UUID) -> tuple[str, int, int, frozenset[UUID]] | None:
    """Name, size and held slots of a deployment's limit, and the runs that hold a slot; None without a limit."""
    limit = client.read_deployment(deployment_id).global_concurrency_limit
    if limit is None:
        return None
    runs = frozenset(run.id for run in active_runs(client, deployment_id))
    return limit.name, limit.limit, limit.active_slots, runs


def _start_time(run: FlowRun) -> float:
    moment = run.start_time or run.expected_start_time or run.created
    return moment.timestamp() if moment else 0.0


def cancel_older() -> None:
    """Cancel the runs of this flow run's deployment that started before it, if its policy is `cancel-oldest`."""
    mine, deployed = flow_run.get_id(), deployment.get_id()
    if not deployed or f"{POLICY_TAG}cancel-oldest" not in flow_run.get_tags():
        return
    wait_for_api()
    with get_client(sync_client=True) as client:
        active = [run for run in active_runs(client, UUID(str(deployed))) if run.state_type != StateType.CANCELLING]
        (me,) = [run for run in active if str(run.id) == str(mine)]
        for run in active:
            if run.id != me.id and _start_time(run) < _start_time(me):
                message = f"{me.name} of the same deployment has started, and its overlap is cancel-oldest"
                client.set_flow_run_state(run.id, Cancelling(message=message), force=True)
                get_run_logger().warning("Cancelled %s (%s), which had not ended", run.name, run.id)
