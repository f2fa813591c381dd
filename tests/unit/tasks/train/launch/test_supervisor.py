"""What a coordinator is told of a claim to a device."""

import pytest

from paceline.conf.environment import Environment
from paceline.tasks.train.launch import supervisor as supervise
from paceline.tasks.train.launch.device_lock import DeviceLock
from paceline.tasks.train.launch.supervisor import claim_status

KEY, DEVICE = "rank-0-of-mine", "cpu here"


@pytest.fixture
def lease():
    lease = DeviceLock(Environment().leases, DEVICE)
    yield lease
    lease.release()


def test_a_claim_that_has_not_begun_is_told_whose_the_device_is(lease):
    assert claim_status(KEY, DEVICE).owner is None
    assert lease.take("of-another", 3)
    found = claim_status(KEY, DEVICE)
    assert found.state == "queued"
    assert (found.owner.run_id, found.owner.rank) == ("of-another", 3)


def test_a_claim_that_begins_while_it_is_asked_for_does_not_wait_for_itself(lease, monkeypatch):
    class Begins(DeviceLock):
        def owner(self):
            watch = supervise._Watch(0)
            monkeypatch.setitem(supervise._watches, KEY, watch)
            watch.held = lease.take("mine", 0)
            return super().owner()

    monkeypatch.setattr(supervise, "DeviceLock", Begins)
    found = claim_status(KEY, DEVICE)
    assert (found.state, found.owner) == ("held", None)


def test_a_rank_that_a_slow_fork_server_starts_is_running(lease, monkeypatch, make_spec):
    """The coordinator gives it the time of a start, and does not count its worker as lost."""
    watch, found = supervise._Watch(0), []

    def start_slowly(spec, path, lock, heartbeat):
        found.append(claim_status(KEY, DEVICE))
        raise OSError("no server")

    monkeypatch.setitem(supervise._watches, KEY, watch)
    monkeypatch.setattr(supervise, "start_rank", start_slowly)
    with pytest.raises(OSError, match="no server"):
        supervise._run(make_spec().model_dump_json(), lease, watch)
    assert (found[0].state, found[0].has_heartbeat) == ("running", False)
    assert watch.started is None
