import subprocess
import sys

from paceline.tasks.train.launch.run_lock import is_locked, run_lock
from tests.support.refusals import refused

HOLD = "import sys, time; from pathlib import Path; from paceline.tasks.train.launch.run_lock import run_lock\n"
HOLD += "with run_lock(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"


def test_a_run_has_one_owner_and_a_dead_one_lets_go(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "r1")], stdout=subprocess.PIPE, text=True)
    with holder:
        assert holder.stdout.readline().strip() == "held"
        with refused(None, "r1"), run_lock(tmp_path / "r1"):
            pass
        assert is_locked(tmp_path / "r1") is True
        holder.kill()
    assert is_locked(tmp_path / "r1") is False
    assert is_locked(tmp_path / "r2") is None
    with run_lock(tmp_path / "r1"):
        pass
