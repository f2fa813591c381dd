import errno
import os
import stat
import subprocess
import sys

import pytest

from paceline.tasks.errors import RunError
from paceline.tasks.train.launch.device_lock import DeviceLock
from tests.support.refusals import refused

HOLD = "import sys, time; from pathlib import Path; from paceline.tasks.train.launch.device_lock import DeviceLock\n"
HOLD += "lease = DeviceLock(Path(sys.argv[1]), 'GPU-1'); print(lease.take('r1', 3), flush=True); time.sleep(60)"
INHERIT = (
    "import subprocess, sys; from pathlib import Path; from paceline.tasks.train.launch.device_lock import DeviceLock\n"
)
INHERIT += "lease = DeviceLock(Path(sys.argv[1]), 'GPU-1'); lease.take('r1', 0)\n"
INHERIT += "rank = subprocess.Popen(['sleep', '60'], pass_fds=(lease.fileno(),), stdout=subprocess.DEVNULL, "
INHERIT += "stderr=subprocess.DEVNULL)\n"
INHERIT += "print(rank.pid, flush=True)"


def test_slices_of_a_gpu_have_leases_of_their_own(tmp_path):
    first, second = (DeviceLock(tmp_path, f"MIG-{number}") for number in (1, 2))
    assert (first.take("run", 0), second.take("other", 0)) == (True, True)
    first.release()
    second.release()


def test_a_device_has_one_owner_whom_it_names_and_a_dead_one_lets_go(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    with holder:
        assert holder.stdout.readline().strip() == "True"
        mine = DeviceLock(tmp_path, "GPU-1")
        assert not mine.take("r2", 0)
        owner = mine.owner()
        assert (owner.run_id, owner.rank, owner.pid) == ("r1", 3, holder.pid)
        assert DeviceLock(tmp_path, "GPU-2").take("r2", 0), "another device is free"
        holder.kill()
    assert mine.owner() is None
    assert mine.take("r2", 0)
    mine.release()
    assert mine.owner() is None
    assert mine.take("r2", 0)
    mine.release()


def test_a_device_is_not_free_while_the_rank_lives_that_inherited_it(tmp_path):
    told = subprocess.run([sys.executable, "-c", INHERIT, str(tmp_path)], capture_output=True, text=True, check=True)
    rank = int(told.stdout)
    lease = DeviceLock(tmp_path, "GPU-1")
    assert lease.owner().run_id == "r1"
    assert not lease.take("r2", 0)
    subprocess.run(["kill", "-9", str(rank)], check=True)
    while lease.owner() is not None:
        pass
    assert lease.take("r2", 0)


def test_names_of_devices_make_files_and_lookers_do_not_disturb(tmp_path):
    lease = DeviceLock(tmp_path / "leases", "cpu tcp://10.0.0.1:4000")
    assert lease.owner() is None
    assert lease.take("r1", 0)
    os.utime(lease.fileno())
    assert [path.name for path in (tmp_path / "leases").iterdir()] == ["cpu_tcp___10.0.0.1_4000.lease"]
    assert DeviceLock(tmp_path / "leases", "cpu tcp://10.0.0.1:4000").owner().run_id == "r1"
    lease.release()
    assert list((tmp_path / "leases").iterdir()) == []


@pytest.mark.parametrize("trap", ["link", "hard link", "pipe", "directory"])
def test_a_trap_in_the_directory_of_all_users_is_refused_and_harms_nothing(tmp_path, trap):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    place = tmp_path / "leases" / "GPU-1.lease"
    place.parent.mkdir()
    if trap == "link":
        place.symlink_to(precious)
    elif trap == "hard link":
        place.hardlink_to(precious)
    elif trap == "pipe":
        os.mkfifo(place)
    else:
        place.mkdir()
    lease = DeviceLock(place.parent, "GPU-1")
    for look in (lambda: lease.take("r1", 0), lease.owner):
        with refused(None, place, kind=RunError):
            look()
    assert precious.read_text() == "mine"


def test_a_link_that_leads_to_nowhere_makes_no_file_there(tmp_path):
    (tmp_path / "leases").mkdir()
    (tmp_path / "leases" / "GPU-1.lease").symlink_to(tmp_path / "made")
    with refused(None, tmp_path / "leases" / "GPU-1.lease", kind=RunError):
        DeviceLock(tmp_path / "leases", "GPU-1").take("r1", 0)
    assert not (tmp_path / "made").exists()


def test_only_a_directory_that_it_has_made_is_opened_to_all(tmp_path):
    DeviceLock(tmp_path / "leases", "GPU-1")
    assert stat.S_IMODE((tmp_path / "leases").stat().st_mode) == 0o1777
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    DeviceLock(home, "GPU-1")
    (tmp_path / "link").symlink_to(home)
    with refused("PACELINE_LEASES", "PACELINE_LEASES", kind=RunError):
        DeviceLock(tmp_path / "link", "GPU-1")
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


def test_what_an_owner_says_of_itself_is_a_name_or_is_not_shown(tmp_path):
    lease = DeviceLock(tmp_path, "GPU-1")
    assert lease.take("r1", 0)
    os.pwrite(lease.fileno(), b'{"run_id":"\\u001b[2J x","rank":0,"host":"h","pid":1,"since":1}'.ljust(200), 0)
    assert DeviceLock(tmp_path, "GPU-1").owner().run_id == "unknown"
    lease.release()


def test_a_full_disk_leaves_the_text_out_and_keeps_no_lock(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    mine, other = (DeviceLock(tmp_path, "GPU-1") for _ in range(2))
    monkeypatch.setattr(os, "pwrite", full)
    assert mine.take("r1", 0)
    assert not other.take("r2", 0)
    mine.release()
    assert other.take("r2", 0)
    other.release()
