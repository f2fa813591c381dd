"""Runs that start late, and those that no schedule made: Prefect's server was away longer than it plans."""

import asyncio
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import DeploymentFilter, FlowRunFilter
from prefect.client.schemas.objects import DeploymentSchedule, State, StateDetails, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.events import emit_event
from prefect.exceptions import ObjectNotFound
from prefect.logging import get_logger
from prefect.runtime import deployment, flow_run
from prefect.server.schemas.schedules import SCHEDULE_TYPES
from prefect.types._datetime import now
from pydantic import TypeAdapter

from paceline.tasks.names import LATE_EVENT

MARGIN = timedelta(minutes=1)
"""The server makes the first runs of a new schedule some seconds late, and a run of this moment is not missed yet."""
LATE = timedelta(minutes=10)
"""`infra/automations/late.yaml` and `waiting.yaml` send a message about a run that still waits after this time."""
MAX_RUNS = 1000  # newest missed runs of each schedule that are made: six weeks of hours
PAGE = 200  # flow runs that Prefect's server returns at once
WAITING = "AwaitingConcurrencySlot"  # state of a run that waits for the run before it
MISSED = "Missed"
"""Name of the first state of a missed run, so that Prefect emits its event `prefect.flow-run.Missed` at once."""


def report_late_start(deployment_id: str | None) -> None:
    """Emit an event if this run of a deployment starts late; report the missed runs that only it can find. Log errors.

    Prefect emits nothing itself where its server was away: the run starts as soon as it is late. `paceline serve` finds
    the missed runs of what it serves; a work pool has no process of Paceline's but the flows.
    """
    if deployment_id is None:
        return
    due, late_before = flow_run.get_scheduled_start_time(), now("UTC") - LATE
    try:
        with get_client(sync_client=True) as client:
            states = client.read_flow_run_states(UUID(flow_run.get_id())) if due < late_before else []
            pool = client.read_deployment(UUID(deployment_id)).work_pool_name
    except Exception as error:  # noqa: BLE001  a report must not end a run
        get_logger("paceline").warning("Prefect does not know whether this run starts late (%r)", error)
        return
    is_sent = any(
        state.name == MISSED or state.is_final() or (state.name == WAITING and state.timestamp < late_before)
        for state in states
    )
    if due < late_before and not is_sent:
        resource = {
            "prefect.resource.id": f"prefect.flow-run.{flow_run.get_id()}",
            "prefect.resource.name": str(flow_run.get_name()),
            "prefect.state-name": "Late",
            "prefect.state-message": f"due at {due:%Y-%m-%d %H:%M} UTC, started at {now('UTC'):%Y-%m-%d %H:%M} UTC",
        }
        emit_event(LATE_EVENT, resource=resource)
    if pool is not None:
        report_missed_runs(f"{flow_run.get_flow_name()}/{deployment.get_name()}", None, catch_up=False)


def report_missed_runs(deployment_name: str, checked_until: datetime | None, *, catch_up: bool) -> datetime | None:
    """Create the missed runs of the deployment FLOW/NAME, in the state `Missed`; Prefect emits an event for each.

    With `catch_up` the state is a scheduled one, and the runs start. A paused schedule misses nothing. `checked_until`
    is the result of the previous call; None looks after the last run that was due. Returns the time until which all
    missed runs are created; after an error, which is logged, `checked_until`; None while there is no such deployment.
    """
    log = get_logger("paceline")
    kind = StateType.SCHEDULED if catch_up else StateType.CANCELLED
    try:
        with get_client(sync_client=True) as client:
            found = client.read_deployment_by_name(deployment_name)
            schedules = [schedule for schedule in found.schedules if schedule.active and schedule.updated]
            if found.paused or not schedules:
                return now("UTC")
            since: datetime = max(schedule.updated for schedule in schedules if schedule.updated) + MARGIN
            until: datetime = now("UTC") - MARGIN
            scheduled = _scheduled_times(client, found.id, since)
            since = max(since, checked_until or max(scheduled, default=since))
            for schedule in schedules:
                missed = [due for due in _due_times(schedule, since, until) if due not in scheduled]
                older = len(missed[:-MAX_RUNS])
                more = f"; {older} older ones were missed too and are not listed" if older else ""
                for due in missed[-MAX_RUNS:]:
                    message = f"due at {due:%Y-%m-%d %H:%M} UTC, when Prefect's server was away{more}"
                    details = StateDetails.model_validate({"scheduled_time": due})
                    client.create_flow_run_from_deployment(
                        found.id,
                        parameters=schedule.parameters,
                        state=State(type=kind, name=MISSED, message=message, state_details=details),
                        idempotency_key=f"missed {schedule.id} {due.isoformat()}",
                    )
                    log.warning("A run of %s was missed: %s", deployment_name, message)
            return until
    except ObjectNotFound:  # the deployment is new
        return None
    except Exception as error:  # noqa: BLE001  a report must not end a run
        log.warning("Missed runs of %s could not be found (%r)", deployment_name, error)
        return checked_until


def _due_times(schedule: DeploymentSchedule, since: datetime, until: datetime) -> list[datetime]:
    """All times in UTC at which a schedule was due; Prefect computes at most 1,000 of them at once."""
    times: list[datetime] = []
    rule = TypeAdapter[SCHEDULE_TYPES](SCHEDULE_TYPES).validate_python(schedule.schedule.model_dump())
    while page := asyncio.run(rule.get_dates(start=since, end=until)):
        times += [due.astimezone(UTC) for due in page]
        since = page[-1] + timedelta.resolution
    return times


def _scheduled_times(client: SyncPrefectClient, deployment_id: UUID, since: datetime) -> set[datetime]:
    """The times until now at which the runs that a deployment's schedules have made were due."""
    due = {"expected_start_time": {"after_": since, "before_": now("UTC")}, "tags": {"all_": ["auto-scheduled"]}}
    read = partial(
        client.read_flow_runs,
        deployment_filter=DeploymentFilter.model_validate({"id": {"any_": [deployment_id]}}),
        flow_run_filter=FlowRunFilter.model_validate(due),
        sort=FlowRunSort.EXPECTED_START_TIME_DESC,
        limit=PAGE,
    )
    times: set[datetime] = set()
    for number in count():
        page = read(offset=number * PAGE)
        times |= {run.expected_start_time for run in page if run.expected_start_time is not None}
        if len(page) < PAGE:
            break
    return times
