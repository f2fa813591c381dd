import gc
import subprocess
import sys
import threading
import time

import psutil
import pytest

from paceline.tasks.measure import energy
from paceline.tasks.measure.energy import EnergyMeter, Packages


def _zone(root, name, kind, microjoules, largest=1_000_000_000):
    zone = root / name
    zone.mkdir(parents=True)
    (zone / "name").write_text(f"{kind}\n")
    (zone / "energy_uj").write_text(f"{microjoules}\n")
    (zone / "max_energy_range_uj").write_text(f"{largest}\n")
    return zone / "energy_uj"


def test_nothing_readable_is_none(tmp_path):
    meter = EnergyMeter(powercap_root=tmp_path)
    assert (meter.joules(), meter.source) == (None, None)


def test_packages_add_up_and_their_parts_do_not_count_twice(tmp_path):
    first = _zone(tmp_path, "intel-rapl:0", "package-0", 5_000_000)
    second = _zone(tmp_path, "intel-rapl:1", "package-1", 7_000_000)
    for name, kind in (("intel-rapl:0:0", "core"), ("intel-rapl:2", "psys")):
        part = _zone(tmp_path, name, kind, 0)
        part.write_text("999000000")
    meter = EnergyMeter(powercap_root=tmp_path)
    assert (meter.joules(), meter.source) == (0.0, "CPU packages")
    first.write_text("8000000")
    second.write_text("7500000")
    assert meter.joules() == pytest.approx(3.5)
    assert meter.joules() == pytest.approx(3.5)


def test_counters_wrap(tmp_path):
    counter = _zone(tmp_path, "intel-rapl:0", "package-0", 90_000_000, largest=100_000_000)
    meter = EnergyMeter(powercap_root=tmp_path)
    for microjoules in (5_000_000, 60_000_000, 10_000_000):
        counter.write_text(str(microjoules))
        joules = meter.joules()
    assert joules == pytest.approx(15 + 55 + 50)


def test_a_wrap_is_seen_although_nobody_asks(tmp_path, monkeypatch):
    monkeypatch.setattr(energy, "SECONDS_PER_READ", 0.01)
    counter = _zone(tmp_path, "intel-rapl:0", "package-0", 0, largest=100_000_000)
    read = threading.Event()
    looked = Packages.read

    def note(self):
        result = looked(self)
        read.set()
        return result

    monkeypatch.setattr(Packages, "read", note)
    meter = EnergyMeter(powercap_root=tmp_path)
    for microjoules in (90_000_000, 80_000_000):
        (tmp_path / "next").write_text(str(microjoules))
        (tmp_path / "next").replace(counter)  # at once, for the thread reads it meanwhile
        read.clear()
        assert read.wait(10)
        read.clear()
        assert read.wait(10)
    assert meter.joules() == pytest.approx(180)
    alive = threading.active_count()
    del meter
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == energy.THREAD_NAME:
            thread.join(10)
    assert threading.active_count() < alive


def test_a_counter_for_root_alone_is_none(tmp_path, monkeypatch):
    counter = _zone(tmp_path, "intel-rapl:0", "package-0", 5_000_000)
    counter.unlink()
    assert EnergyMeter(powercap_root=tmp_path).joules() is None
    counter.write_text("5000000")
    meter = EnergyMeter(powercap_root=tmp_path)
    counter.unlink()
    assert (meter.joules(), meter.source) == (None, None)


def test_gpus_alone_with_packages_and_unreadable(tmp_path, monkeypatch):
    told = [100.0]
    monkeypatch.setattr(energy, "gpu_joules", lambda uuids: told[0] if uuids else None)
    alone = EnergyMeter(["GPU-a"], powercap_root=tmp_path)
    counter = _zone(tmp_path, "intel-rapl:0", "package-0", 0)
    both = EnergyMeter(["GPU-a"], powercap_root=tmp_path)
    told[0] = 130.0
    counter.write_text("2000000")
    assert (alone.joules(), alone.source) == (30.0, "GPUs")
    assert (both.joules(), both.source) == (32.0, "GPUs and CPU packages")
    told[0] = None
    assert both.joules() is None
    unreadable = EnergyMeter(["GPU-a"], powercap_root=tmp_path)
    assert (unreadable.joules(), unreadable.source) == (None, None)  # the packages' part would pass for the whole


def test_processes_on_the_processors_are_no_neighbours_of_gpus(tmp_path, monkeypatch):
    busy = iter([{(1, "other"): 0.0}, {(1, "other"): 1000.0}] * 2)
    monkeypatch.setattr(energy, "gpu_joules", lambda uuids: 100.0)
    monkeypatch.setattr(energy, "_foreign_seconds", lambda own: next(busy))
    found = EnergyMeter(["GPU-a"], powercap_root=tmp_path).energy(has_gpu_neighbours=False)
    assert (found.low is None, found.neighbours) == (False, ())
    _zone(tmp_path, "intel-rapl:0", "package-0", 0)
    found = EnergyMeter(["GPU-a"], powercap_root=tmp_path).energy(has_gpu_neighbours=False)
    assert (found.low is None, found.neighbours) == (True, ("other (1000.00 cores)",))


@pytest.fixture
def counter(tmp_path):
    return _zone(tmp_path, "intel-rapl:0", "package-0", 0)


def test_a_reading_has_its_interval_and_the_part_above_the_power_before_the_start(tmp_path, counter):
    meter = EnergyMeter(powercap_root=tmp_path, own=psutil.pids)  # so that no other work on this machine counts
    counter.write_text("100000000")
    found = meter.energy(False)
    assert (found.joules, found.low, found.high, found.neighbours) == (100.0, 95.0, 105.0, ())
    found = found.model_copy(update={"seconds": 10.0})
    merged = energy.merge([found, found], [2.0, 3.0], {})
    assert (merged.joules, merged.low, merged.high, merged.idle_watts) == (200.0, 190.0, 210.0, 5.0)
    assert merged.why_no_samples == energy.NO_BLOCKS
    resumed = energy.merge([found.model_copy(update={"source": "GPUs"})], [None], {})
    assert (resumed.joules, resumed.idle_watts, resumed.why_no_samples) == (100.0, None, energy.GPU_TOO_SLOW)
    assert energy.merge([found, None], [2.0, None], {}) is None, "a host without a counter leaves the sum unknown"


def test_a_busy_neighbour_is_named_and_takes_the_interval(tmp_path, counter):
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        meter = EnergyMeter(powercap_root=tmp_path, own=lambda: ())
        while psutil.Process(busy.pid).cpu_times().user < 0.6:
            time.sleep(0.01)
        counter.write_text("100000000")
        found = meter.energy(False)
    finally:
        busy.kill()
        busy.wait()
    assert any(name.startswith("python") and name.endswith(" cores)") for name in found.neighbours), found.neighbours
    assert (found.joules, found.low, found.high) == (100.0, None, None)


def test_the_power_before_the_start_is_measured_for_a_while_and_only_with_a_counter(tmp_path, monkeypatch):
    monkeypatch.setattr(energy, "IDLE_SECONDS", 0.05)
    assert energy.idle_watts((), tmp_path) is None
    counter = _zone(tmp_path, "intel-rapl:0", "package-0", 0)
    monkeypatch.setattr(
        time, "sleep", lambda seconds, sleep=time.sleep: (counter.write_text("1000000"), sleep(seconds))
    )
    watts = energy.idle_watts((), tmp_path)
    assert 1.0 < watts <= 1 / 0.05


def test_a_neighbour_on_a_gpu_takes_the_interval(monkeypatch):
    told = [100.0]
    monkeypatch.setattr(energy, "gpu_joules", lambda uuids: told[0])
    meter = EnergyMeter(["GPU-a"], own=psutil.pids)
    told[0] = 130.0
    ends = [(found.low, found.high) for found in (meter.energy(False), meter.energy(True))]
    assert ends == [(28.5, 31.5), (None, None)]
