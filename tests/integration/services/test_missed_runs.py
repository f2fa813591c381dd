"""Nights that came due while Prefect's server was away for longer than it schedules ahead."""

import time
from datetime import timedelta

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.types._datetime import now

from paceline.flows.lifecycle import missed_runs
from tests.support.patience import until
from tests.support.prefect_server import PrefectServer

ONE_AHEAD = {
    "PREFECT_SERVER_SERVICES_SCHEDULER_MIN_RUNS": "1",
    "PREFECT_SERVER_SERVICES_SCHEDULER_MIN_SCHEDULED_TIME": "PT0S",
    "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "1",
}
EVERY = timedelta(seconds=4)


@flow(name="forgotten")
def forget():
    """Never called: its runs are made."""


def by_state(client, deployment):
    """How many runs there are in each state, and the messages of those that were missed."""
    runs = [run for run in client.read_flow_runs() if run.deployment_id == deployment]
    return {name: [run.state.message for run in runs if run.state_name == name] for name in ("Missed", "Late")}


@pytest.mark.slow
def test_runs_that_no_server_made_are_reported_or_caught_up_with(tmp_path, monkeypatch):
    monkeypatch.setattr(missed_runs, "MARGIN", timedelta(0))
    server = PrefectServer(tmp_path, PREFECT_HOME=str(tmp_path / "prefect"), **ONE_AHEAD)
    server.start()
    try:
        with temporary_settings({PREFECT_API_URL: server.url}), get_client(sync_client=True) as client:
            schedule = DeploymentScheduleCreate(schedule=IntervalSchedule(interval=EVERY))
            made = client.create_deployment(client.create_flow(forget), name="night", schedules=[schedule])
            until(lambda: by_state(client, made)["Late"], "run that nobody starts")
            checked = missed_runs.report_missed_runs("forgotten/night", None, catch_up=False)
            assert by_state(client, made)["Missed"] == [], "the server has made all"
            server.kill()
            assert missed_runs.report_missed_runs("forgotten/night", checked, catch_up=False) == checked
            time.sleep(6 * EVERY.total_seconds())
            server.start()
            back = now("UTC")
            monkeypatch.setattr(missed_runs, "PAGE", 3)  # fewer than were missed
            after = missed_runs.report_missed_runs("forgotten/night", checked, catch_up=False)
            assert after >= back
            missed = by_state(client, made)["Missed"]
            assert len(missed) >= 4
            assert all(message.startswith("due at ") for message in missed)
            missed_runs.report_missed_runs("forgotten/night", checked, catch_up=False)
            assert len(by_state(client, made)["Missed"]) <= len(missed) + 1, "they are reported once"
    finally:
        server.kill()
