"""Nights by schedule that can be killed, wherever they are."""

import os
import tempfile
from pathlib import Path

import pytest

from tests.support.database import Database
from tests.support.deployments import SHORT, Served
from tests.support.jobs import PLANTED
from tests.support.lost_power import kill
from tests.support.prefect_server import PrefectServer

NIGHTLY = ["serve", "digits", *SHORT, "speedup.baseline=none", "execution.loading=foreground", "cluster.num_workers=1"]
SCHEDULE = ["--name", "night", "--cron", "0 2 * * *", "--timezone", "UTC", "--catch-up"]
MEMORY = "prefect.server.concurrency.lease_storage.memory"
QUICK = {
    "PREFECT_SERVER_DEPLOYMENTS_CONCURRENCY_SLOT_WAIT_SECONDS": "1",
    "PREFECT_SERVER_SERVICES_REPOSSESSOR_LOOP_SECONDS": "1",
}


@pytest.fixture
def server(tmp_path):
    """Starts a Prefect server with a home of its own. Its leases are in its memory, as those of a user's own server."""
    started = []

    def start(leases=MEMORY, **environment):
        home = {"PREFECT_HOME": str(tmp_path / "prefect"), "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": leases}
        made = PrefectServer(tmp_path, **QUICK, **home, **environment)
        started.append(made)
        made.start()
        return made

    yield start
    for made in started:
        made.kill()


@pytest.fixture
def postgres():
    """A PostgreSQL of its own, running, with an empty database for Prefect."""
    with tempfile.TemporaryDirectory(prefix="paceline-postgres-", ignore_cleanup_errors=True) as place:
        Path(place).chmod(0o711)
        made = Database(Path(place) / "services")
        made.start()
        made.open_databases()
        yield made
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

    def start(server, overlap="queue", *settings, **environment):
        arguments = ["track.experiment=nights", *settings, *SCHEDULE, "--overlap", overlap]
        options = known | {"PREFECT_API_URL": server.url} | environment
        process = program(*NIGHTLY, *arguments, start_new_session=True, output=None, **options)
        processes.append(process)
        return Served(server.url, "night", process)

    yield start
    for process in processes:
        kill(process)
