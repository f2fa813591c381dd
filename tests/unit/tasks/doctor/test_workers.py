"""What the doctor asks of workers about the data, without any."""

import asyncio
import subprocess
import sys
import threading

import pytest

from paceline.conf.data import Data
from paceline.flows.doctor import _root
from paceline.tasks.doctor import workers
from paceline.tasks.train.launch.run_lock import run_lock


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


LOOK = """
import sys
from paceline.tasks.doctor.workers import look
print(look(sys.argv[1], sys.argv[2], ()).model_dump_json())
"""
OVERLAY = """
echo elsewhere >/proc/sys/kernel/hostname && mount -t tmpfs none "$2" && mkdir "$2/upper" "$2/work" &&
mount -t overlay none -o lowerdir="$1",upperdir="$2/upper",workdir="$2/work" "$1" && shift 2 && exec "$@"
"""


def seen_elsewhere(marker, scratch, *, has_locks):
    """What a worker of another host sees; without locks its mount of the same files knows only locks of its own."""
    command = [sys.executable, "-c", LOOK, str(marker), str(scratch / "leases")]
    setup = OVERLAY if not has_locks else 'echo elsewhere >/proc/sys/kernel/hostname && shift 2 && exec "$@"'
    scratch.mkdir()
    host = ["unshare", "--mount", "--uts", "sh", "-c", setup, "host", str(marker.parent), str(scratch), *command]
    done = subprocess.run(host, check=False, capture_output=True, text=True)
    if done.returncode and ("ermi" in done.stderr or "mount:" in done.stderr):
        pytest.skip(f"needs namespaces and overlay mounts: {done.stderr.strip()}")
    return workers.Seen.model_validate_json(done.stdout)


@pytest.mark.parametrize("has_locks", [True, False])
def test_a_mount_without_locks_between_hosts_is_named(tmp_path, has_locks):
    marker = tmp_path / "home" / ".doctor-1"
    marker.parent.mkdir()
    marker.touch()
    with run_lock(marker.with_suffix(workers.LOCK_SUFFIX)):
        here = workers.look(str(marker), str(tmp_path / "leases"), ())
        there = seen_elsewhere(marker, tmp_path / "scratch", has_locks=has_locks)
    assert here.sees_lock
    assert (there.host, there.sees_home) == ("elsewhere", True)
    finding = workers._locks({"tcp://a:1": here, "tcp://b:1": there}, marker.parent)
    if has_locks:
        assert (finding.status, finding.found) == ("ok", f"a lock of {here.host} holds on 1 other hosts")
    else:
        assert finding.status == "error"
        assert finding.found.startswith(f"elsewhere does not see a lock that {here.host} takes in PACELINE_HOME=")
        assert "it is overlay (" in finding.found
        assert "nolock" in finding.remedy


def test_only_a_source_of_its_own_knows_what_its_root_is(tmp_path):
    assert _root(Data(source="table", root="warehouse.images")) == (None, [])
    assert _root(Data(source="folder", root=str(tmp_path))) == (str(tmp_path), [])
    root, (finding,) = _root(Data(source="folder", root="nosuch://place"))
    assert (root, finding.check, finding.status) == (None, "data", "error")
    assert finding.found.startswith("data.root=nosuch://place: cannot be opened")
