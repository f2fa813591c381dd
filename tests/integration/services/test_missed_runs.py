"""Nights that came due while Prefect's server was away for longer than it schedules ahead."""

import asyncio
import re
import time
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import pairwise

import httpx
import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, WorkPoolCreate
from prefect.client.schemas.objects import State, StateDetails, StateType
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.events.worker import EventsWorker
from prefect.flow_engine import run_flow
from prefect.schedules import Schedule
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import AwaitingRetry, Cancelled, Late, Scheduled
from prefect.types._datetime import now

from paceline.flows.deployment import PatientRunner
from paceline.flows.lifecycle import missed_runs
from paceline.flows.lifecycle.outage import guard_flow
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
    names = ("Missed", "Late")
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
            missed = by_state(client, made)["Missed"]
            until(lambda: len(received) >= len(missed), "messages", seconds=60)
            texts = [message["text"] for message in received]
            assert len(texts) <= 7, "they are reported once"
            assert len(set(texts)) == len(texts)
            assert all(re.fullmatch(r"Run \S+ of night is Missed: due at .*", text) for text in texts)
            if catch_up:
                ready = client.get_scheduled_flow_runs_for_deployments([made], scheduled_before=now("UTC"))
                assert missed.keys() <= {run.name for run in ready}, "they are to start"
            assert {f"Run {name} of night is Missed: {message}" for name, message in missed.items()} == set(texts)
    finally:
        server.kill()


@pytest.fixture(scope="module")
def idle_url(tmp_path_factory):
    """The address of a server that makes no runs of schedules."""
    directory = tmp_path_factory.mktemp("idle")
    settings = {"PREFECT_HOME": str(directory), "PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED": "false"}
    server = PrefectServer(directory, **settings)
    server.start()
    yield server.url
    server.kill()


@pytest.fixture
def idle_client(idle_url, monkeypatch):
    monkeypatch.setattr(missed_runs, "MARGIN", timedelta(0))
    EventsWorker.drain_all(timeout=10, at_exit=False)  # one process has one, which keeps the server of an earlier test
    with temporary_settings({PREFECT_API_URL: idle_url}), get_client(sync_client=True) as made:
        yield made


def deploy_idle(client, name, interval, **options):
    schedule = DeploymentScheduleCreate(schedule=IntervalSchedule(interval=interval))
    return client.create_deployment(client.create_flow(forget), name=name, schedules=[schedule], **options)


@flow(name="guarded-night")
@guard_flow
def night():
    """A night that has nothing to do."""


@contextmanager
def alarm(url):
    """What the automations of this server send to a web hook while the body runs."""
    with web_hook() as (address, received):
        set_alarm(address, PREFECT_API_URL=url)
        yield received


@flow(name="outer")
def around():
    """The deployed flow of a user, with two of Paceline's in it."""
    time.sleep(1.1)  # they are due when they are called
    night()
    night()


def start_night(client, deployment, states, body=night):
    """Run a night that was due an hour ago, after it has been in these states."""
    due = Scheduled(scheduled_time=now("UTC") - timedelta(hours=1))
    run = client.create_flow_run_from_deployment(deployment, state=due)
    for state in states:
        client.set_flow_run_state(run.id, state, force=True)
    run_flow(body, flow_run=client.read_flow_run(run.id))
    assert client.read_flow_run(run.id).state.is_completed()
    return run


@pytest.mark.parametrize("body", [night, pytest.param(around, marks=pytest.mark.slow)])
def test_a_night_that_starts_hours_late_is_sent_once(body, idle_client, idle_url):
    """Prefect's server was away when it was due, so that it is `Late` for some seconds only."""
    deployment = idle_client.create_deployment(idle_client.create_flow(body), name="late", tags=["paceline"])
    due = now("UTC") - timedelta(hours=1)
    with alarm(idle_url) as received:
        missed = State(type=StateType.SCHEDULED, name="Missed", state_details=StateDetails(scheduled_time=due))
        start_night(idle_client, deployment, [missed], body)
        start_night(idle_client, deployment, [Cancelled(name="Ended"), AwaitingRetry()], body)
        late = start_night(idle_client, deployment, [Late(scheduled_time=due)], body)
        until(lambda: any(late.name in message["text"] for message in received), "message", seconds=60)
    texts = [message["text"] for message in received if "Late" in message["text"]]
    assert len(texts) == 1, "others have had a message, or were started again by somebody"
    due = late.expected_start_time
    expected = rf"Run {late.name} of late is Late: due at {due:%Y-%m-%d %H:%M} UTC, started at .* UTC"
    assert re.fullmatch(expected, texts[0])


def test_a_night_that_starts_in_time_is_not_late_though_an_inner_flow_is(idle_client, idle_url, monkeypatch):
    monkeypatch.setattr(missed_runs, "LATE", timedelta(seconds=0.5))
    deployment = idle_client.create_deployment(idle_client.create_flow(around), name="punctual")
    run = idle_client.create_flow_run_from_deployment(deployment, state=Scheduled(scheduled_time=now("UTC")))

    def names():
        wanted = {"filter": {"resource": {"id": [f"prefect.flow-run.{run.id}"]}}}
        return {event["event"] for event in httpx.post(f"{idle_url}/events/filter", json=wanted).json()["events"]}

    run_flow(around, flow_run=run)
    EventsWorker.drain_all(timeout=10, at_exit=False)
    until(lambda: "prefect.flow-run.Completed" in names(), "event")
    assert "paceline.late" not in names()


@pytest.mark.parametrize("body", [night, around])
def test_a_night_of_a_work_pool_reports_the_missed_ones_before_it(body, idle_client, monkeypatch):
    """Also when a later one is due already: no worker was there, or the night had to wait for another one."""
    pool = f"pool-of-{body.name}"
    idle_client.create_work_pool(WorkPoolCreate(name=pool, type="process"))
    flow_id, every = idle_client.create_flow(body), timedelta(seconds=1)
    schedule = DeploymentScheduleCreate(schedule=IntervalSchedule(interval=every))
    of_pool, of_serve = (
        idle_client.create_deployment(flow_id, name=name, schedules=[schedule], work_pool_name=pool_name)
        for name, pool_name in (("of-pool", pool), ("of-serve", None))
    )
    time.sleep(3)
    scheduled = {"state": Scheduled(scheduled_time=now("UTC")), "tags": ["auto-scheduled"]}
    for deployment in (of_pool, of_serve):
        idle_client.create_flow_run_from_deployment(deployment, **scheduled)
        start_night(idle_client, deployment, [], body)
    names = {run.state_name for run in runs_of(idle_client, of_pool)}
    assert names == {"Missed", "Completed", "Scheduled"}
    names = {run.state_name for run in runs_of(idle_client, of_serve)}
    assert names == {"Completed", "Scheduled"}, "`paceline serve` reports them"


@pytest.mark.parametrize("is_paused", [False, True])
def test_what_comes_due_after_an_orderly_stop_of_serve_is_missed(is_paused, idle_client):
    """The stop pauses the schedule, as a user may have done before."""
    every = Schedule(interval=timedelta(seconds=1))
    name = f"stopped-{is_paused}"
    deployment = night.to_deployment(name, schedule=every, paused=is_paused, entrypoint_type="module_path")

    async def serve_and_stop():
        async with PatientRunner(pause_on_shutdown=True) as runner:
            return await runner.aadd_deployment(deployment)

    made = asyncio.run(serve_and_stop())
    time.sleep(3)
    report = partial(missed_runs.report_missed_runs, f"guarded-night/{name}", catch_up=False)
    report(report(None))
    messages = [run.state.message for run in runs_of(idle_client, made)]
    assert bool(messages) is not is_paused
    assert all(text.endswith(" UTC, when `paceline serve` was stopped") for text in messages)


def runs_of(client, deployment):
    return [run for run in client.read_flow_runs() if run.deployment_id == deployment]


def test_no_missed_run_may_start_when_an_error_interrupts_the_check(idle_client, monkeypatch):
    """After each request that changes something, the connection fails: as a client sees it, and as a server does."""
    made = []

    def fail(client, method, path, **options):
        if method == "POST" and not path.endswith("filter"):
            if len(made) in {0, 3}:
                made.append(path)
                raise httpx.ConnectError("the server is away")
            made.append(path)
            if len(made) == 3:
                request(client, method, path, **options)
                raise httpx.ReadTimeout("the answer was lost")
        return request(client, method, path, **options)

    request = SyncPrefectClient.request
    deployment = deploy_idle(idle_client, "night", timedelta(seconds=1))
    time.sleep(4)
    monkeypatch.setattr(SyncPrefectClient, "request", fail)
    checked = None
    for _ in range(3):
        assert missed_runs.report_missed_runs("forgotten/night", checked, catch_up=False) is None
        assert not any(run.state.is_scheduled() for run in runs_of(idle_client, deployment))
    assert missed_runs.report_missed_runs("forgotten/night", checked, catch_up=False) is not None
    states = [run.state for run in runs_of(idle_client, deployment)]
    assert {(state.type, state.name) for state in states} == {(StateType.CANCELLED, "Missed")}
    due = sorted(state.state_details.scheduled_time for state in states)
    assert len(due) >= 3
    assert {(later - earlier).total_seconds() for earlier, later in pairwise(due)} == {1}, "each of them once"


def test_missed_runs_beyond_the_most_that_are_made_are_counted(idle_client, monkeypatch):
    monkeypatch.setattr(missed_runs, "MAX_RUNS", 2)
    deployment = deploy_idle(idle_client, "often", timedelta(milliseconds=1))
    time.sleep(3)
    missed_runs.report_missed_runs("forgotten/often", None, catch_up=False)
    messages = [run.state.message for run in runs_of(idle_client, deployment)]
    assert len(messages) == 2
    counts = {int(re.search(r"; (\d+) older ones were missed too and are not listed", text)[1]) for text in messages}
    assert min(counts) > 2000, "more than Prefect computes at once"


def test_a_schedule_that_cannot_be_computed_does_not_end_the_run_that_asks(idle_client, monkeypatch):
    def fail(*_):
        raise ValueError("no such time zone")

    deploy_idle(idle_client, "unreadable", timedelta(hours=1))
    monkeypatch.setattr(missed_runs, "_due_times", fail)
    before = now("UTC")
    assert missed_runs.report_missed_runs("forgotten/unreadable", before, catch_up=False) == before
