from types import SimpleNamespace

from paceline.tasks.doctor import device_process
from paceline.tasks.doctor.device_process import disk_rate


def test_a_disk_is_read_and_nothing_is_left(tmp_path):
    rate = disk_rate(tmp_path, num_bytes=8 * 2**20)
    assert rate is None or rate > 0  # some file systems keep all in memory
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(device_process.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    assert disk_rate(tmp_path, num_bytes=2**20) is None
