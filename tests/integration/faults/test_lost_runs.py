"""What lost runs have left in Prefect: states that nobody will end, and slots that nobody holds."""

import re
import signal
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from uuid import UUID, uuid4

import psutil
import pytest
from mlflow.tracking import MlflowClient
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitUpdate
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling, Pending, Running

from paceline.conf.environment import Environment
from paceline.flows.lifecycle import flow_run_lock, overlap
from paceline.flows.lifecycle.flow_run_lock import set_right
from paceline.tasks.track.store import check_store
from tests.support.lost_power import guardians
from tests.support.patience import until

OWNER = """
import sys, time
from uuid import UUID
from paceline.conf.environment import Environment
from paceline.flows.lifecycle.flow_run_lock import flow_run_lock
from paceline.flows.lifecycle.guardian import guard
guard(flow_run_lock(Environment(), UUID(sys.argv[1])))
print("held", flush=True)
time.sleep(600)
"""


@flow(name="lost")
def lose():
    """Never called: its runs are made."""


@pytest.fixture
def client(prefect_url, monkeypatch, tmp_path):
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    monkeypatch.setattr(flow_run_lock, "MIN_AGE_SECONDS", 0.0)
    with temporary_settings({PREFECT_API_URL: prefect_url}), get_client(sync_client=True) as made:
        yield made


@pytest.fixture
def deployment(client):
    """A deployment of its own with a limit of one run."""
    flow_id = client.create_flow(lose)
    made = client.create_deployment(flow_id, name=str(uuid4()), concurrency_limit=1)
    return str(made)


@pytest.fixture
def owned():
    """Has a process of this host own a flow run; the process."""
    processes = []

    def start(run):
        process = subprocess.Popen([sys.executable, "-c", OWNER, str(run.id)], stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def run_in(client, deployment, *states):
    """A run of a deployment that has gone through these states."""
    run = client.create_flow_run_from_deployment(UUID(deployment))
    for state in states:
        client.set_flow_run_state(run.id, state)
    return client.read_flow_run(run.id)


def held(client, deployment):
    return client.read_deployment(UUID(deployment)).global_concurrency_limit.active_slots


def test_a_run_is_crashed_when_its_process_is_gone_and_never_before(client, deployment, owned):
    run = run_in(client, deployment, Pending(), Running())
    process = owned(run)
    set_right(Environment(), deployment)
    assert client.read_flow_run(run.id).state.is_running()
    assert held(client, deployment) == 1
    process.kill()
    process.wait()
    set_right(Environment(), deployment)
    state = client.read_flow_run(run.id).state
    assert (state.is_crashed(), state.message) == (True, f"its process on {socket.gethostname()} is gone")
    assert held(client, deployment) == 0
    assert not list((Environment().root / "flow-runs" / socket.gethostname()).iterdir())


def test_a_run_that_was_to_be_cancelled_is_cancelled_when_its_process_is_gone(client, deployment, owned):
    run = run_in(client, deployment, Pending(), Running(), Cancelling())
    process = owned(run)
    process.kill()
    process.wait()
    set_right(Environment(), None)
    assert client.read_flow_run(run.id).state.is_cancelled()
    assert held(client, deployment) == 0


def test_an_orphan_that_is_to_be_cancelled_is_ended_and_a_run_with_a_runner_is_not(client, deployment):
    """Only its runner would have ended it."""
    run = run_in(client, deployment, Pending(), Running(), Cancelling())
    runner = "import subprocess, sys, time; subprocess.Popen([sys.executable, *sys.argv[1:]]); time.sleep(600)"
    command = [sys.executable, "-c", runner, "-c", OWNER, str(run.id)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "held\n"
        set_right(Environment(), deployment)
        (orphan,) = [child for child in psutil.Process(parent.pid).children() if str(run.id) in child.cmdline()]
        assert orphan.is_running()
        parent.kill()
        parent.wait()
        set_right(Environment(), deployment)
        psutil.wait_procs([orphan], timeout=10)
        assert not orphan.is_running()
    set_right(Environment(), deployment)
    assert client.read_flow_run(run.id).state.is_cancelled()
    assert held(client, deployment) == 0


def test_a_run_of_another_host_is_left_alone(client, deployment, owned, monkeypatch):
    run = run_in(client, deployment, Pending(), Running())
    process = owned(run)
    process.kill()
    process.wait()
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    set_right(Environment(), deployment)
    assert client.read_flow_run(run.id).state.is_running()
    assert held(client, deployment) == 1


def test_a_process_that_is_about_to_take_its_lock_is_not_gone(client, deployment, monkeypatch):
    monkeypatch.setattr(flow_run_lock, "MIN_AGE_SECONDS", 60.0)
    run = run_in(client, deployment, Pending(), Running())
    record = Environment().root / "flow-runs" / socket.gethostname() / str(run.id)
    record.mkdir(parents=True)
    (record / "lock").touch()
    set_right(Environment(), deployment)
    assert client.read_flow_run(run.id).state.is_running()


def test_a_process_that_ends_in_order_leaves_no_record_and_no_guardian(client, deployment, owned):
    process = owned(run_in(client, deployment, Pending(), Running()))
    assert len(guardians(Environment().root)) == 1
    process.send_signal(signal.SIGINT)
    process.wait()
    assert not list((Environment().root / "flow-runs" / socket.gethostname()).iterdir())
    assert not guardians(Environment().root)


def test_a_guardian_outlives_its_process_and_its_signals(client, deployment, owned):
    process = owned(run_in(client, deployment, Pending(), Running()))
    (guardian,) = guardians(Environment().root)
    status = Path(f"/proc/{guardian.pid}/status")
    ignored = re.compile(r"^SigIgn:\s*(\w+)$", re.MULTILINE)
    until(lambda: int(ignored.search(status.read_text())[1], 16) >> (signal.SIGTERM - 1) & 1, "start")
    process.kill()
    process.wait()
    guardian.send_signal(signal.SIGTERM)
    assert guardian.is_running()
    guardian.kill()


@pytest.mark.slow
def test_a_guardian_that_is_killed_has_a_successor_that_knows_all_records(
    client, deployment, owned, prefect_url, monkeypatch
):
    monkeypatch.setenv("PREFECT_API_URL", prefect_url)
    run = run_in(client, deployment, Pending(), Running())
    process = owned(run)
    (first,) = guardians(Environment().root)
    first.kill()
    (second,) = until(lambda: [one for one in guardians(Environment().root) if one.pid != first.pid], "guardian")
    process.kill()
    process.wait()
    assert client.read_flow_run(run.id).state.is_running()
    until(lambda: client.read_flow_run(run.id).state_name == "Crashed", "state by the next guardian", seconds=60)
    psutil.wait_procs([second], timeout=10)
    assert not guardians(Environment().root)


def test_mlflow_runs_of_a_lost_flow_run_are_killed_while_prefect_is_away(client, deployment, owned):
    """Without a lock too, which the process was about to take. Runs of other flow runs are left alone."""
    run, another = (run_in(client, deployment, Pending(), Running()) for _ in range(2))
    uri = Environment().tracking_uri
    experiment_id = check_store(uri, "lost", None)
    tags = {"paceline.host": socket.gethostname(), "prefect.flow_run_id": str(run.id)}
    mlflow = MlflowClient(uri)
    mine = mlflow.create_run(experiment_id, tags=tags).info.run_id
    other = mlflow.create_run(experiment_id, tags=tags | {"prefect.flow_run_id": str(another.id)}).info.run_id
    process = owned(run)
    set_right(Environment(), None)
    assert mlflow.get_run(mine).info.status == "RUNNING"
    process.kill()
    process.wait()
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        set_right(Environment(), None)
    assert [mlflow.get_run(run_id).info.status for run_id in (mine, other)] == ["KILLED", "RUNNING"]
    assert client.read_flow_run(run.id).state.is_running()
    set_right(Environment(), None)
    assert client.read_flow_run(run.id).state.is_crashed()


def set_slots(client, deployment, number):
    limit = client.read_deployment(UUID(deployment)).global_concurrency_limit.name
    client.update_global_concurrency_limit(limit, GlobalConcurrencyLimitUpdate(active_slots=number))


def test_a_slot_without_a_run_is_freed(client, deployment):
    set_slots(client, deployment, 1)  # by a run that is no more, without a lease that could expire
    assert run_in(client, deployment, Pending()).state.name == "AwaitingConcurrencySlot"
    set_right(Environment(), deployment)
    assert held(client, deployment) == 0


def test_a_slot_is_held_for_a_run_that_lives_and_for_no_other(client, deployment, owned):
    run = run_in(client, deployment, Pending(), Running())
    set_slots(client, deployment, 0)  # its lease has expired
    set_right(Environment(), deployment)
    assert held(client, deployment) == 0, "the run may be of a host that is no more"
    owned(run)
    set_right(Environment(), deployment)
    assert held(client, deployment) == 1


def test_a_run_that_never_came_to_its_process_is_crashed_and_may_still_come(client, deployment, monkeypatch):
    run = run_in(client, deployment, Pending())
    set_right(Environment(), deployment)
    assert client.read_flow_run(run.id).state.is_pending()
    monkeypatch.setattr(overlap, "PENDING_LIMIT", timedelta(0))
    set_right(Environment(), deployment)
    assert client.read_flow_run(run.id).state.is_crashed()
    assert held(client, deployment) == 0
    client.set_flow_run_state(run.id, Running())
    assert client.read_flow_run(run.id).state.is_running()
