"""What the doctor asks of workers about the data, without any."""

import asyncio
import threading

import pytest

from paceline.conf.data import Data
from paceline.flows.doctor import _root
from paceline.tasks.doctor import workers


def test_a_dead_mount_keeps_a_thread_waiting_and_not_the_worker(monkeypatch):
    mounted_again = threading.Event()
    monkeypatch.setattr(workers, "REACH_SECONDS", 0.2)
    monkeypatch.setattr(workers, "_lacks", lambda _: mounted_again.wait(60) and "")

    async def ticks_meanwhile():
        asked = asyncio.create_task(workers.lacks_data("/dead"))
        ticks = 0
        while not asked.done():
            await asyncio.sleep(0.01)
            ticks += 1
        mounted_again.set()  # the end of the loop waits for the thread
        return asked.result(), ticks

    said, ticks = asyncio.run(ticks_meanwhile())
    assert said.startswith("data.root=/dead: no answer within")
    assert ticks > 2, "the worker's loop goes on"


@pytest.mark.parametrize(
    ("contexts", "status"),
    [({}, "ok"), ({"GPU-a": False}, "warning"), ({"GPU-a": False, "GPU-b": True}, "error")],
)
def test_workers_that_hold_a_context_are_reported(contexts, status):
    here = workers.look("/none/marker", "/none/leases", ())
    assert here.contexts == {}
    seats = {"tcp://a:1": here, "tcp://a:2": here.model_copy(update={"contexts": contexts})}
    finding = workers._contexts(seats)
    assert finding.status == status
    assert ("tcp://a:2" in finding.found) == bool(contexts)


def test_only_a_source_of_its_own_knows_what_its_root_is(tmp_path):
    assert _root(Data(source="table", root="warehouse.images")) == (None, [])
    assert _root(Data(source="folder", root=str(tmp_path))) == (str(tmp_path), [])
    root, (finding,) = _root(Data(source="folder", root="nosuch://place"))
    assert (root, finding.check, finding.status) == (None, "data", "error")
    assert finding.found.startswith("data.root=nosuch://place: cannot be opened")
