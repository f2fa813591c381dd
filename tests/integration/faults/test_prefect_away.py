"""A Prefect that fails, and comes back: the training that it started ends well, and so does the next night."""

import time

import pytest

from tests.integration.faults.conftest import MEMORY
from tests.support.deployments import LONG
from tests.support.lost_power import flow_of, kill, slots, status_of
from tests.support.patience import until

FILES = "prefect.server.concurrency.lease_storage.filesystem"
IMPATIENT = {"PREFECT_CLIENT_MAX_RETRIES": "0", "RENEWAL": "1"}
"""Every question that fails does so at once, and a lease is renewed each second: an outage of seconds is a long one."""
POLICIES = ("queue", "skip", "cancel-oldest")


@pytest.mark.slow
def test_a_training_ends_well_while_prefect_is_away_and_the_next_night_starts(server, serve, hold, tmp_path):
    """Away while the lease is renewed, new runs are looked for and the training ends; no lease is known afterwards."""
    up = server()
    served = serve(up, **IMPATIENT)
    run = served.begin_with()
    assert status_of(tmp_path / "home", run) == "RUNNING"
    up.kill()
    hold.unlink()
    until(lambda: status_of(tmp_path / "home", run) != "RUNNING", "end of the training", process=served.process)
    assert status_of(tmp_path / "home", run) == "FINISHED"
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
    assert status_of(tmp_path / "home", run) == "RUNNING"
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
    assert status_of(tmp_path / "home", lost) == "RUNNING"
    kill(served.process)
    hold.unlink()
    served = serve(up)
    assert served.end_of(served.begin_with())["type"] == "COMPLETED"
    assert served.state(lost)["type"] == "CRASHED"


@pytest.mark.slow
def test_the_night_after_a_flow_that_was_killed_starts_and_completes(server, serve, hold, tmp_path):
    served = serve(server())
    lost = served.begin_with()
    assert status_of(tmp_path / "home", lost) == "RUNNING"
    flow_of(served).kill()
    assert served.end_of(lost)["type"] == "CRASHED"
    hold.unlink()
    assert served.end_of(served.begin_with())["type"] == "COMPLETED"


@pytest.mark.slow
@pytest.mark.parametrize("overlap", POLICIES)
def test_a_training_ends_well_while_the_database_is_away_and_the_next_night_starts(
    server, serve, hold, overlap, tmp_path, postgres
):
    """Prefect's server answers meanwhile, and says of itself that it is healthy."""
    up = server(FILES, PREFECT_SERVER_DATABASE_CONNECTION_URL=postgres.uri)
    served = serve(up, overlap, **IMPATIENT)
    run = served.begin_with()
    assert status_of(tmp_path / "home", run) == "RUNNING"
    postgres.kill()
    hold.unlink()
    until(lambda: status_of(tmp_path / "home", run) != "RUNNING", "end of the training", process=served.process)
    assert status_of(tmp_path / "home", run) == "FINISHED"
    flow = flow_of(served)
    time.sleep(5)
    assert flow.is_running(), "it waits for a server that it can report to"
    postgres.start()
    until(up.is_ready, "database")
    assert served.end_of(run)["type"] == "COMPLETED"
    until(lambda: slots(served) == 0, "free slot")
    assert served.end_of(served.begin_with())["type"] == "COMPLETED"


@pytest.mark.slow
@pytest.mark.parametrize("overlap", POLICIES)
def test_the_night_after_a_reboot_of_all_with_its_database_starts_and_completes(
    server, serve, hold, overlap, tmp_path, postgres
):
    up = server(FILES, PREFECT_SERVER_DATABASE_CONNECTION_URL=postgres.uri)
    served = serve(up, overlap)
    lost = served.begin_with(**LONG)
    assert status_of(tmp_path / "home", lost) == "RUNNING"
    kill(served.process)
    up.kill()
    postgres.kill()
    hold.unlink()
    postgres.start()
    up.start()
    served = serve(up, overlap)
    assert served.end_of(served.begin_with())["type"] == "COMPLETED"
    assert (served.state(lost)["type"], status_of(tmp_path / "home", lost)) == ("CRASHED", "KILLED")
    assert slots(served) == 0


@pytest.mark.slow
@pytest.mark.parametrize("overlap", POLICIES)
def test_a_night_ends_well_and_the_next_one_starts_after_serve_alone_was_killed(server, serve, hold, overlap, tmp_path):
    up = server()
    served = serve(up, overlap)
    run = served.begin_with()
    assert status_of(tmp_path / "home", run) == "RUNNING"
    served.process.kill()
    served.process.wait()
    served = serve(up, overlap)
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
@pytest.mark.timeout(1500)
def test_a_training_survives_ten_minutes_without_prefect(server, serve, hold, tmp_path):
    """With the client's own settings: it renews its lease after 225 s, and gives up a request after a minute."""
    up = server()
    served = serve(up)
    run = served.begin_with()
    assert status_of(tmp_path / "home", run) == "RUNNING"
    up.kill()
    time.sleep(300)
    assert status_of(tmp_path / "home", run) == "RUNNING"
    hold.unlink()
    time.sleep(300)
    assert status_of(tmp_path / "home", run) == "FINISHED"
    up.start()
    assert served.end_of(run)["type"] == "COMPLETED"
    assert served.end_of(served.begin_with())["type"] == "COMPLETED"
