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
