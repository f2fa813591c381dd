import subprocess
import sys

from tasks.train.lease import Lease

HOLD = "import sys, time; from pathlib import Path; from tasks.train.lease import Lease\n"
HOLD += "lease = Lease(Path(sys.argv[1]), 'GPU-1'); print(lease.take('r1', 3), flush=True); time.sleep(60)"
INHERIT = "import subprocess, sys; from pathlib import Path; from tasks.train.lease import Lease\n"
INHERIT += "lease = Lease(Path(sys.argv[1]), 'GPU-1'); lease.take('r1', 0)\n"
INHERIT += "rank = subprocess.Popen(['sleep', '60'], pass_fds=(lease.fileno(),), stdout=subprocess.DEVNULL, "
INHERIT += "stderr=subprocess.DEVNULL)\n"
INHERIT += "print(rank.pid, flush=True)"


def test_a_device_has_one_owner_whom_it_names_and_a_dead_one_lets_go(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    with holder:
        assert holder.stdout.readline().strip() == "True"
        mine = Lease(tmp_path, "GPU-1")
        assert not mine.take("r2", 0)
        owner = mine.owner()
        assert (owner.run_id, owner.rank, owner.pid) == ("r1", 3, holder.pid)
        assert Lease(tmp_path, "GPU-2").take("r2", 0), "another device is free"
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
    lease = Lease(tmp_path, "GPU-1")
    assert lease.owner().run_id == "r1"
    assert not lease.take("r2", 0)
    subprocess.run(["kill", "-9", str(rank)], check=True)
    while lease.owner() is not None:
        pass
    assert lease.take("r2", 0)


def test_names_of_devices_make_files_and_lookers_do_not_disturb(tmp_path):
    lease = Lease(tmp_path / "leases", "cpu tcp://10.0.0.1:4000")
    assert lease.owner() is None
    assert lease.take("r1", 0)
    lease.beat()
    assert [path.name for path in (tmp_path / "leases").iterdir()] == ["cpu_tcp___10.0.0.1_4000.lease"]
    assert Lease(tmp_path / "leases", "cpu tcp://10.0.0.1:4000").owner().run_id == "r1"
    lease.release()
    assert list((tmp_path / "leases").iterdir()) == []
