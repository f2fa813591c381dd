"""Nights that came due while Prefect's server was away for longer than it schedules ahead."""

import re
import time
from datetime import timedelta
from functools import partial

import httpx
import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.types._datetime import now

from paceline.flows.lifecycle import missed_runs
from tests.support.nights import set_alarm, web_hook
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
    """The runs in each state, and the messages of those that were missed."""
    runs = [run for run in client.read_flow_runs() if run.deployment_id == deployment]
    names = ("Missed", "Late", "Scheduled")
    return {name: {run.name: run.state.message for run in runs if run.state_name == name} for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("catch_up", [False, True])
def test_each_run_that_no_server_made_is_reported_or_caught_up_with(catch_up, tmp_path, monkeypatch):
    monkeypatch.setattr(missed_runs, "MARGIN", timedelta(0))
    server = PrefectServer(tmp_path, PREFECT_HOME=str(tmp_path / "prefect"), **ONE_AHEAD)
    server.start()
    report = partial(missed_runs.report_missed_runs, "forgotten/night", catch_up=catch_up)
    try:
        with (
            temporary_settings({PREFECT_API_URL: server.url}),
            get_client(sync_client=True) as client,
            web_hook() as (address, received),
        ):
            set_alarm(address, PREFECT_API_URL=server.url)
            schedule = DeploymentScheduleCreate(schedule=IntervalSchedule(interval=EVERY))
            flow_id = client.create_flow(forget)
            made = client.create_deployment(flow_id, name="night", schedules=[schedule], tags=["paceline"])
            until(lambda: by_state(client, made)["Late"], "run that nobody starts")
            checked = report(None)
            assert by_state(client, made)["Missed"] == {}, "the server has made all"
            server.kill()
            assert report(checked) == checked
            time.sleep(6 * EVERY.total_seconds())
            server.start()
            back = now("UTC")
            monkeypatch.setattr(missed_runs, "PAGE", 3)  # fewer than were missed
            after = report(checked)
            assert after >= back
            until(lambda: len(received) >= 4, "messages", seconds=60)
            report(checked)
            states = by_state(client, made)
            missed = states["Missed"]
            until(lambda: len(received) >= len(missed), "messages", seconds=60)
            texts = [message["text"] for message in received]
            assert len(texts) <= 7, "they are reported once"
            assert len(set(texts)) == len(texts)
            assert all(re.fullmatch(r"Run \S+ of night is Missed: due at .*", text) for text in texts)
            if catch_up:
                assert missed == {}, "they are to start"
                assert {text.split()[1] for text in texts} <= {*states["Late"], *states["Scheduled"]}
            else:
                assert {f"Run {name} of night is Missed: {message}" for name, message in missed.items()} == set(texts)
    finally:
        server.kill()


def test_missed_runs_do_not_start_although_no_event_can_be_emitted(tmp_path, monkeypatch):
    def refuse(client, method, path, **options):
        if path == "/events":
            raise httpx.ReadTimeout("the server is busy")
        return request(client, method, path, **options)

    request = SyncPrefectClient.request
    monkeypatch.setattr(SyncPrefectClient, "request", refuse)
    monkeypatch.setattr(missed_runs, "MARGIN", timedelta(0))
    server = PrefectServer(
        tmp_path, PREFECT_HOME=str(tmp_path / "prefect"), PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED="false"
    )
    server.start()
    try:
        with temporary_settings({PREFECT_API_URL: server.url}), get_client(sync_client=True) as client:
            schedule = DeploymentScheduleCreate(schedule=IntervalSchedule(interval=timedelta(seconds=1)))
            made = client.create_deployment(client.create_flow(forget), name="night", schedules=[schedule])
            time.sleep(4)
            assert missed_runs.report_missed_runs("forgotten/night", None, catch_up=False) is not None
            states = by_state(client, made)
            assert len(states.pop("Missed")) >= 2
            assert not any(states.values())
    finally:
        server.kill()
