import gc
import threading

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
