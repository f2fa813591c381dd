"""A Prefect that fails, and comes back: the training that it started ends well, and so does the next night."""

import os

import psutil
import pytest
from mlflow.tracking import MlflowClient

from tests.support.deployments import LONG, SHORT, Served
from tests.support.jobs import PLANTED
from tests.support.patience import until
from tests.support.prefect_server import PrefectServer

NIGHTLY = ["serve", "digits", *SHORT, "speedup.baseline=none", "execution.loading=foreground", "cluster.num_workers=1"]
SCHEDULE = ["--name", "night", "--cron", "0 2 * * *", "--timezone", "UTC", "--catch-up"]
EXPERIMENT = "away"
FILES = "prefect.server.concurrency.lease_storage.filesystem"
MEMORY = "prefect.server.concurrency.lease_storage.memory"
QUICK = {
    "PREFECT_SERVER_DEPLOYMENTS_CONCURRENCY_SLOT_WAIT_SECONDS": "1",
    "PREFECT_SERVER_SERVICES_REPOSSESSOR_LOOP_SECONDS": "1",
}
IMPATIENT = {"PREFECT_CLIENT_MAX_RETRIES": "0", "RENEWAL": "1"}
"""Every question that fails does so at once, and a lease is renewed each second: an outage of seconds is a long one."""
POLICIES = ("queue", "skip", "cancel-oldest")


@pytest.fixture
def server(tmp_path):
    """Starts a Prefect server with a home of its own. Its leases are in its memory, as those of a user's own server."""
    started = []

    def start(leases=MEMORY):
        home = {"PREFECT_HOME": str(tmp_path / "prefect"), "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": leases}
        made = PrefectServer(tmp_path, **QUICK, **home)
        started.append(made)
        made.start()
        return made

    yield start
    for made in started:
        made.kill()


@pytest.fixture
def hold(tmp_path):
    """As long as this file exists, no training continues."""
    path = tmp_path / "hold"
    path.touch()
    return path


@pytest.fixture
def serve(program, tmp_path, hold):
    """Serves the deployment `night` of a server; its flows are ended with the test."""
    processes = []
    path = os.pathsep.join(filter(None, [PLANTED, os.environ.get("PYTHONPATH", "")]))
    homes = {"PACELINE_HOME": str(tmp_path / "home"), "PREFECT_HOME": str(tmp_path / "client")}
    known = homes | {"PREFECT_RUNNER_POLL_FREQUENCY": "1", "PYTHONPATH": path, "HOLD": str(hold)}

    def start(server, overlap="queue", **environment):
        arguments = [f"track.experiment={EXPERIMENT}", *SCHEDULE, "--overlap", overlap]
        options = known | {"PREFECT_API_URL": server.url} | environment
        process = program(*NIGHTLY, *arguments, start_new_session=True, output=None, **options)
        processes.append(process)
        return Served(server.url, "night", process)

    yield start
    for process in processes:
        kill(process)


def kill(process):
    """Kill a process, and with it its descendants, at once, as a power failure does."""
    try:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait(30)


def flow_of(served):
    """The process of the one flow that is served."""

    def found():
        children = psutil.Process(served.process.pid).children()
        return [child for child in children if "prefect.engine" in child.cmdline()]

    (process,) = until(found, "process of the flow")
    return process


def slots(served):
    """How many of the deployment's slots are held, as Prefect has it; 0 without a limit."""
    limit = served.deployment["global_concurrency_limit"]
    return limit["active_slots"] if limit else 0


def status_of(tmp_path, run):
    """The status in MLflow of a flow run, once it has one."""
    home = tmp_path / "home"
    until(lambda: list(home.glob("runs/*/lock")), "MLflow run")  # its database is not to be made by two at once
    client = MlflowClient(f"sqlite:///{home / 'mlflow.db'}")

    def found():
        experiment = client.get_experiment_by_name(EXPERIMENT)
        return experiment and client.search_runs([experiment.experiment_id], f"tags.`prefect.flow_run_id` = '{run}'")

    return until(found, "MLflow run")[0].info.status


@pytest.mark.slow
def test_a_training_ends_well_while_prefect_is_away_and_the_next_night_starts(server, serve, hold, tmp_path):
    """Away while the lease is renewed, new runs are looked for and the training ends; no lease is known afterwards."""
    up = server()
    served = serve(up, **IMPATIENT)
    run = served.begin_with()
    assert status_of(tmp_path, run) == "RUNNING"
    up.kill()
    hold.unlink()
    until(lambda: status_of(tmp_path, run) != "RUNNING", "end of the training", process=served.process)
    assert status_of(tmp_path, run) == "FINISHED"
    assert flow_of(served).is_running(), "it waits for a server that it can report to"
    up.start()
    assert served.end_of(run)["type"] == "COMPLETED"
    assert slots(served) == 0
    assert served.end_of(served.begin_with())["type"] == "COMPLETED"


@pytest.mark.slow
@pytest.mark.parametrize("overlap", POLICIES)
@pytest.mark.parametrize("leases", [MEMORY, FILES])
def test_the_night_after_a_reboot_starts_and_completes(server, serve, hold, overlap, leases):
    up = server(leases)
    served = serve(up, overlap)
    lost = served.begin_with(**LONG)
    served.wait_until_running(lost)
    kill(served.process)
    up.kill()
    hold.unlink()
    up.start()
    served = serve(up, overlap)
    night = served.begin_with()
    assert served.end_of(night)["type"] == "COMPLETED"
    state = served.state(lost)
    assert (state["type"], state["message"].endswith("is gone")) == ("CRASHED", True)
    assert slots(served) == 0


@pytest.mark.slow
@pytest.mark.parametrize("overlap", POLICIES)
@pytest.mark.parametrize("leases", [MEMORY, FILES])
def test_a_run_holds_its_slot_over_a_restart_of_the_server(server, serve, hold, overlap, leases, tmp_path):
    up = server(leases)
    served = serve(up, overlap, RENEWAL="1")
    run = served.begin_with()
    assert status_of(tmp_path, run) == "RUNNING"
    up.kill()
    up.start()
    overlapping = served.begin_with()
    if overlap == "queue":
        until(lambda: served.state(overlapping)["name"] == "AwaitingConcurrencySlot", "run that waits")
    if overlap == "skip":
        assert served.end_of(overlapping)["type"] == "CANCELLED"
    if overlap == "cancel-oldest":
        assert served.end_of(run)["type"] == "CANCELLED"
    hold.unlink()
    assert served.end_of(run)["type"] == ("CANCELLED" if overlap == "cancel-oldest" else "COMPLETED")
    if overlap != "skip":
        assert served.end_of(overlapping)["type"] == "COMPLETED"
    until(lambda: slots(served) == 0, "free slot")
    assert served.end_of(served.begin_with())["type"] == "COMPLETED"


@pytest.mark.slow
def test_the_night_after_all_but_the_server_was_killed_starts_and_completes(server, serve, hold, tmp_path):
    up = server()
    served = serve(up)
    lost = served.begin_with()
    assert status_of(tmp_path, lost) == "RUNNING"
    kill(served.process)
    hold.unlink()
    served = serve(up)
    assert served.end_of(served.begin_with())["type"] == "COMPLETED"
    assert served.state(lost)["type"] == "CRASHED"


@pytest.mark.slow
def test_the_night_after_a_flow_that_was_killed_starts_and_completes(server, serve, hold, tmp_path):
    served = serve(server())
    lost = served.begin_with()
    assert status_of(tmp_path, lost) == "RUNNING"
    flow_of(served).kill()
    assert served.end_of(lost)["type"] == "CRASHED"
    hold.unlink()
    assert served.end_of(served.begin_with())["type"] == "COMPLETED"
