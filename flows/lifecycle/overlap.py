"""The overlap policy `cancel-oldest`; Prefect's own limits implement the other policies."""

from uuid import UUID

from prefect import get_run_logger
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.runtime import deployment, flow_run
from prefect.states import Cancelling

from paceline.flows.lifecycle.concurrency_slots import active_runs
from paceline.flows.lifecycle.outage import wait_for_api

POLICY_TAG = "overlap:"  # prefix of the tag that names a deployment's policy; its runs have the tag too


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
