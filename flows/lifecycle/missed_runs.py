"""Runs that start late, and those that no schedule made: Prefect's server or `paceline serve` was away."""

import asyncio
from datetime import UTC, datetime, timedelta
from itertools import count
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import DeploymentFilter, FlowRunFilter
from prefect.client.schemas.objects import DeploymentSchedule, FlowRun, State, StateDetails, StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.sorting import FlowRunSort
from prefect.events import emit_event
from prefect.events.related import object_as_related_resource, tags_as_related_resources
from prefect.exceptions import ObjectNotFound
from prefect.logging import get_logger
from prefect.runtime import flow_run
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
STOPPED_TAG = "paused-by-serve"  # of a deployment that `paceline serve` has paused at its end


_reported = set[UUID]()  # runs of deployments in this process, which may have several flows of Paceline's in them


def report_late_and_missed_runs() -> None:
    """Emit an event if this run of a deployment starts late; report the missed runs that only it can find. Log errors.

    Prefect emits nothing itself where its server was away: the run starts as soon as it is late. `paceline serve` finds
    the missed runs of what it serves; a work pool has no process of Paceline's but the flows.
    """
    try:
        run_id = UUID(flow_run.get_root_flow_run_id())
        if run_id in _reported:
            return
        _reported.add(run_id)
        with get_client(sync_client=True) as client:
            run = client.read_flow_run(run_id)
            due = run.expected_start_time
            if run.deployment_id is None or due is None:
                return
            deployed = client.read_deployment(run.deployment_id)
            _report_late(client, run, deployed, due)
            if deployed.work_pool_name is not None:
                before = _newest_scheduled(client, deployed.id, due - timedelta.resolution)  # not this run
                _make_missed_runs(client, deployed, before, catch_up=False)
    except Exception as error:  # noqa: BLE001  a report must not end a run
        get_logger("paceline").warning("Late and missed runs could not be reported (%r)", error)


def _report_late(client: SyncPrefectClient, run: FlowRun, deployed: DeploymentResponse, due: datetime) -> None:
    """Emit an event if a run should have started long ago, and neither it nor Prefect has reported that."""
    started = run.start_time or now("UTC")  # an inner flow may start long after it
    late_before = started - LATE
    if due >= late_before:
        return
    for state in client.read_flow_run_states(run.id):
        if state.name == MISSED or state.is_final() or (state.name == WAITING and state.timestamp < late_before):
            return
    resource = {
        "prefect.resource.id": f"prefect.flow-run.{run.id}",
        "prefect.resource.name": run.name,
        "prefect.state-name": "Late",
        "prefect.state-message": f"due at {due:%Y-%m-%d %H:%M} UTC, started at {started:%Y-%m-%d %H:%M} UTC",
    }
    # Prefect adds those of this flow, which may be an inner one.
    related = [object_as_related_resource("deployment", "deployment", deployed), *tags_as_related_resources(run.tags)]
    emit_event(LATE_EVENT, resource=resource, related=related)


def report_missed_runs(deployment_name: str, checked_until: datetime | None, *, catch_up: bool) -> datetime | None:
    """Create the missed runs of the deployment FLOW/NAME, in the state `Missed`; Prefect emits an event for each.

    With `catch_up` the state is a scheduled one, and the runs start. A paused schedule misses nothing, unless it was
    `paceline serve` that paused it at its end. `checked_until` is the result of the previous call; None looks after the
    last run that was due. Returns the time until which all missed runs are created; after an error, which is logged,
    `checked_until`; None if the deployment does not exist.
    """
    try:
        with get_client(sync_client=True) as client:
            deployed = client.read_deployment_by_name(deployment_name)
            checked_until = checked_until or _newest_scheduled(client, deployed.id, now("UTC"))
            return _make_missed_runs(client, deployed, checked_until, catch_up=catch_up)
    except ObjectNotFound:  # the deployment is new
        return None
    except Exception as error:  # noqa: BLE001  a report must not end a run
        get_logger("paceline").warning("Missed runs of %s could not be found (%r)", deployment_name, error)
        return checked_until


def _make_missed_runs(
    client: SyncPrefectClient, deployed: DeploymentResponse, checked_until: datetime | None, *, catch_up: bool
) -> datetime:
    """Create the missed runs of a deployment that were due after a time; return the time until which it has them."""
    kind = StateType.SCHEDULED if catch_up else StateType.CANCELLED
    schedules = [schedule for schedule in deployed.schedules if schedule.active and schedule.updated]
    if (deployed.paused and STOPPED_TAG not in deployed.tags) or not schedules:
        return now("UTC")
    cause = "`paceline serve` was stopped" if deployed.paused else "Prefect's server was away"
    since: datetime = max(schedule.updated for schedule in schedules if schedule.updated) + MARGIN
    since, until = max(since, checked_until or since), now("UTC") - MARGIN
    scheduled = _scheduled_times(client, deployed.id, since)
    for schedule in schedules:
        missed = [due for due in _due_times(schedule, since, until) if due not in scheduled]
        older = len(missed[:-MAX_RUNS])
        more = f"; {older} older ones were missed too and are not listed" if older else ""
        for due in missed[-MAX_RUNS:]:
            message = f"due at {due:%Y-%m-%d %H:%M} UTC, when {cause}{more}"
            details = StateDetails.model_validate({"scheduled_time": due})
            client.create_flow_run_from_deployment(
                deployed.id,
                parameters=schedule.parameters,
                state=State(type=kind, name=MISSED, message=message, state_details=details),
                idempotency_key=f"missed {schedule.id} {due.isoformat()}",
            )
            get_logger("paceline").warning("A run of %s was missed: %s", deployed.name, message)
    return until


def _due_times(schedule: DeploymentSchedule, since: datetime, until: datetime) -> list[datetime]:
    """All times in UTC at which a schedule was due; Prefect computes at most 1,000 of them at once."""
    times: list[datetime] = []
    rule = TypeAdapter[SCHEDULE_TYPES](SCHEDULE_TYPES).validate_python(schedule.schedule.model_dump())
    while page := asyncio.run(rule.get_dates(start=since, end=until)):
        times += [due.astimezone(UTC) for due in page]
        since = page[-1] + timedelta.resolution
    return times


def _newest_scheduled(client: SyncPrefectClient, deployment_id: UUID, until: datetime) -> datetime | None:
    """The time at which the newest run that a deployment's schedules have made until a time was due."""
    deployed = _read_scheduled(client, deployment_id, {"before_": until}, 1)
    return deployed[0].expected_start_time if deployed else None


def _scheduled_times(client: SyncPrefectClient, deployment_id: UUID, since: datetime) -> set[datetime | None]:
    """The times from `since` until now at which the runs that a deployment's schedules have made were due."""
    between = {"after_": since, "before_": now("UTC")}
    times = set[datetime | None]()
    for number in count():
        page = _read_scheduled(client, deployment_id, between, PAGE, number * PAGE)
        times |= {run.expected_start_time for run in page}
        if len(page) < PAGE:
            break
    return times


def _read_scheduled(
    client: SyncPrefectClient, deployment_id: UUID, due: dict[str, datetime], limit: int, offset: int = 0
) -> list[FlowRun]:
    """A page of the runs that a deployment's schedules have made and that were due in a time, the newest first."""
    wanted = {"expected_start_time": due, "tags": {"all_": ["auto-scheduled"]}}
    return client.read_flow_runs(
        deployment_filter=DeploymentFilter.model_validate({"id": {"any_": [deployment_id]}}),
        flow_run_filter=FlowRunFilter.model_validate(wanted),
        sort=FlowRunSort.EXPECTED_START_TIME_DESC,
        limit=limit,
        offset=offset,
    )
