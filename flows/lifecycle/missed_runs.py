"""Runs that a schedule did not make, because Prefect's server was away for longer than it schedules ahead."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import partial
from itertools import count
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import DeploymentFilter, FlowRunFilter
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.sorting import FlowRunSort
from prefect.events import Event
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.logging import get_logger
from prefect.types._datetime import now

from paceline.tasks.names import MISSED_EVENT

MARGIN = timedelta(minutes=1)
"""The server makes the first runs of a new schedule some seconds late, and a run of this moment is not missed yet."""
MAX_RUNS = 1000  # of each schedule that are made: six weeks of hours
PAGE = 200  # flow runs that Prefect's server returns at once


def report_missed_runs(deployment_name: str, checked_until: datetime | None, *, catch_up: bool) -> datetime | None:
    """Have Prefect make the missed runs of the deployment FLOW/NAME, and emit an event for each.

    They get the state `Missed`, unless `catch_up` lets them start. Returns None while there is no such deployment. A
    schedule that is paused misses nothing. `checked_until` is the result of the previous call; None looks after the
    last run that was due. Logs errors.
    """
    log = get_logger("paceline")
    try:
        with get_client(sync_client=True) as client:
            deployment = client.read_deployment_by_name(deployment_name)
            changes = [schedule.updated for schedule in deployment.schedules if schedule.active and schedule.updated]
            if deployment.paused or not changes:
                return now("UTC")
            since: datetime = max(changes) + MARGIN
            until: datetime = now("UTC") - MARGIN
            scheduled = _scheduled_runs(client, deployment.id, since, now("UTC"))
            since = max(since, checked_until or max(scheduled.values(), default=since))
            window = {"start_time": since.isoformat(), "end_time": until.isoformat()}
            limits = {"min_runs": MAX_RUNS, "max_runs": MAX_RUNS}
            path = {"id": deployment.id}
            client.request("POST", "/deployments/{id}/schedule", path_params=path, json=window | limits)
            made = _scheduled_runs(client, deployment.id, since, until)
            missed = {
                run_id: f"due at {due:%Y-%m-%d %H:%M} UTC, when Prefect's server was away"
                for run_id, due in made.items()
                if run_id not in scheduled
            }
            if not catch_up:  # all of them before the first event, which may fail
                for run_id, message in missed.items():
                    with _logged(f"Run {run_id} of {deployment_name} was missed, and may start"):
                        state = State(type=StateType.CANCELLED, name="Missed", message=message)
                        client.set_flow_run_state(run_id, state)
            for run_id, message in missed.items():
                log.warning("A run of %s was missed: %s", deployment_name, message)
                with _logged(f"No event could be emitted for run {run_id} of {deployment_name}"):
                    _emit_missed(client, client.read_flow_run(run_id), deployment, message)
            return until
    except ObjectNotFound:  # the deployment is new
        return None
    except (httpx.HTTPError, PrefectException) as error:
        log.warning("Missed runs of %s could not be found (%r)", deployment_name, error)
        return checked_until


@contextmanager
def _logged(consequence: str) -> Iterator[None]:
    """Log an error of Prefect's server with its consequence, and continue."""
    try:
        yield
    except (httpx.HTTPError, PrefectException) as error:
        get_logger("paceline").warning("%s (%r)", consequence, error)


def _emit_missed(client: SyncPrefectClient, run: FlowRun, deployment: DeploymentResponse, message: str) -> None:
    """Emit an event with the labels of Prefect's own for a state, which comes 15 minutes late for a new run."""
    state = {"prefect.state-name": "Missed", "prefect.state-message": message}
    resource = {"prefect.resource.id": f"prefect.flow-run.{run.id}", "prefect.resource.name": run.name, **state}
    origin = {"prefect.resource.id": f"prefect.deployment.{deployment.id}", "prefect.resource.name": deployment.name}
    tags = [{"prefect.resource.id": f"prefect.tag.{tag}", "prefect.resource.role": "tag"} for tag in run.tags]
    related = [origin | {"prefect.resource.role": "deployment"}, *tags]
    event = Event.model_validate({"event": MISSED_EVENT, "resource": resource, "related": related})
    client.request("POST", "/events", json=[event.model_dump(mode="json")])


def _scheduled_runs(
    client: SyncPrefectClient, deployment_id: UUID, since: datetime, until: datetime
) -> dict[UUID, datetime]:
    """The runs of a deployment that its schedule has made, with the time at which they were due."""
    due = {"expected_start_time": {"after_": since, "before_": until}, "tags": {"all_": ["auto-scheduled"]}}
    read = partial(
        client.read_flow_runs,
        deployment_filter=DeploymentFilter.model_validate({"id": {"any_": [deployment_id]}}),
        flow_run_filter=FlowRunFilter.model_validate(due),
        sort=FlowRunSort.EXPECTED_START_TIME_DESC,
        limit=PAGE,
    )
    runs: dict[UUID, datetime] = {}
    for number in count():
        page = read(offset=number * PAGE)
        runs |= {run.id: run.expected_start_time for run in page if run.expected_start_time is not None}
        if len(page) < PAGE:
            break
    return runs
