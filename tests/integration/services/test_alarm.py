"""The automations that infra/alarm creates send nights that did not run well to a web hook."""

from datetime import timedelta
from uuid import uuid4

import pytest
from prefect import flow
from prefect.automations import Automation
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import ConcurrencyLimitStrategy, ConcurrencyOptions
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelled, Completed, Crashed, Failed, Pending, Running, Scheduled
from prefect.types._datetime import now

from tests.support.nights import set_alarm, web_hook
from tests.support.patience import until


@flow(name="guarded")
def guard():
    """Never called: its runs are made."""


@pytest.fixture
def client(prefect_url):
    with temporary_settings({PREFECT_API_URL: prefect_url}), get_client(sync_client=True) as made:
        yield made


@pytest.fixture
def received(prefect_url):
    """What has been sent to the web hook, which this server calls from now on."""
    with web_hook() as (address, texts):
        assert address not in set_alarm(address, PREFECT_API_URL=prefect_url)
        yield texts


def deploy(client, *tags, **options):
    flow_id = client.create_flow(guard)
    return client.create_deployment(flow_id, name=str(uuid4()), tags=["overlap:skip", *tags], **options)


def run_to(client, deployment, *states):
    run = client.create_flow_run_from_deployment(deployment)
    for state in states:
        client.set_flow_run_state(run.id, state)
    return run.name


def test_a_night_that_did_not_complete_is_sent(client, received):
    others, nights = deploy(client), deploy(client, "paceline")
    run_to(client, others, Pending(), Running(), Failed(message="of somebody else"))
    run_to(client, nights, Pending(), Running(), Completed(message="all is well"))
    name = client.read_deployment(nights).name
    ends = [Failed(message="no disk"), Crashed(message="no process"), Cancelled(message="no room")]
    wanted = set()
    for end in ends:
        run = run_to(client, nights, Pending(), Running(), end)
        wanted.add(f"Run {run} of {name} is {end.name}: {end.message}")
    until(lambda: len(received) >= len(ends), "messages", seconds=60)
    assert {message["text"] for message in received} == wanted


@pytest.mark.slow
def test_a_night_that_is_skipped_is_sent(client, received):
    """Prefect skips a run when it is to start, or when it has become late."""
    strategy = ConcurrencyOptions(collision_strategy=ConcurrencyLimitStrategy.CANCEL_NEW)
    nights = deploy(client, "paceline", concurrency_limit=1, concurrency_options=strategy)
    run_to(client, nights, Pending(), Running())
    starting = run_to(client, nights, Pending())
    due = Scheduled(scheduled_time=now("UTC") - timedelta(minutes=1))
    late = client.create_flow_run_from_deployment(nights, state=due).name
    until(lambda: len(received) >= 2, "messages", seconds=60)
    end = f"of {client.read_deployment(nights).name} is Cancelled: Deployment concurrency limit reached."
    assert {message["text"] for message in received} == {f"Run {starting} {end}", f"Run {late} {end}"}


@pytest.mark.slow
def test_a_night_that_is_due_and_does_not_start_is_sent(client, received):
    """What would serve the deployment is away. Prefect looks for late runs every five seconds."""
    automation = Automation.read(name="paceline late night")
    automation.trigger.within = timedelta(seconds=10)
    automation.update()
    nights = deploy(client, "paceline")
    due = now("UTC") - timedelta(minutes=1)
    late, started = (
        client.create_flow_run_from_deployment(nights, state=Scheduled(scheduled_time=due)) for _ in range(2)
    )
    until(lambda: client.read_flow_run(started.id).state.name == "Late", "late run")
    client.set_flow_run_state(started.id, Pending())
    until(lambda: received, "message", seconds=90)
    name = client.read_deployment(nights).name
    assert [message["text"] for message in received] == [f"Run {late.name} of {name} was due and has not started"]


def test_a_night_that_waits_for_another_one_is_sent_once(client, received):
    automation = Automation.read(name="paceline waiting night")
    automation.trigger.threshold = 3
    automation.update()
    nights = deploy(client, "paceline", concurrency_limit=1)
    run_to(client, nights, Pending(), Running())
    run_to(client, nights, Pending(), Pending())
    waiting = run_to(client, nights, *(Pending() for _ in range(7)))
    run_to(client, nights, Cancelled(message="the end of this test"))
    until(lambda: len(received) >= 2, "messages", seconds=60)
    name = client.read_deployment(nights).name
    assert f"Run {waiting} of {name} was due and still waits for the run before it" in [
        message["text"] for message in received
    ]
    assert len(received) == 2, "once for each run, and not for one that has just started to wait"


@pytest.mark.slow
def test_a_waiting_night_that_nothing_tries_to_start_is_sent(client, received):
    """What served the deployment has ended while the night waited for another one."""
    automation = Automation.read(name="paceline late night")
    automation.trigger.within = timedelta(seconds=10)
    automation.update()
    nights = deploy(client, "paceline", concurrency_limit=1)
    run_to(client, nights, Pending(), Running())
    waiting = run_to(client, nights, Pending(), Pending())
    until(lambda: received, "message", seconds=90)
    name = client.read_deployment(nights).name
    assert [message["text"] for message in received] == [f"Run {waiting} of {name} was due and has not started"]
