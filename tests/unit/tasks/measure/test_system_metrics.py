"""The machine's load: the same figures, under the same names, as MLflow's own sampler."""

import socket
import sys
import threading
from types import SimpleNamespace

import pytest
from mlflow.system_metrics.metrics import gpu_monitor
from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

from paceline.tasks.measure import system_metrics as load
from paceline.tasks.measure.system_metrics import log_system_metrics
from tests.support.patience import until

BUSY = {"cpu_utilization_percentage", "network_receive_megabytes", "network_transmit_megabytes"}
"""Other figures at each look."""


class Boards:
    """NVML of a host with two GPUs, of which the second tells its memory only."""

    NVMLError = ValueError
    UUIDS = ("GPU-a", "GPU-b")

    def nvmlInit(self):
        pass

    def nvmlShutdown(self):
        pass

    def nvmlDeviceGetCount(self):
        return len(self.UUIDS)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.UUIDS[index]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return self.UUIDS[self.UUIDS.index(uuid)]

    def nvmlDeviceGetIndex(self, handle):
        return self.UUIDS.index(handle)

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(total=80_000_000_000, used=20_000_000_000)

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=self._of_the_first(handle, 93), memory=40)

    def nvmlDeviceGetPowerUsage(self, handle):
        return self._of_the_first(handle, 350_000)

    def nvmlDeviceGetEnforcedPowerLimit(self, handle):
        return self._of_the_first(handle, 700_000)

    def _of_the_first(self, handle, value):
        if handle != self.UUIDS[0]:
            raise self.NVMLError("not supported")
        return value


@pytest.fixture
def boards(monkeypatch):
    made = Boards()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    monkeypatch.setattr(gpu_monitor, "pynvml", made)
    return made


def samples(uuids):
    found = []
    with log_system_metrics(lambda metrics, number: found.append((number, metrics)), uuids):
        pass
    return found


def of_mlflow(monitor):
    monitor.collect_metrics()
    return {f"system/{name}": value for name, value in monitor.aggregate_metrics().items()}


def test_the_hosts_figures_are_mlflows():
    ((number, ours),) = samples(())
    assert number == 0
    theirs = of_mlflow(CPUMonitor()) | of_mlflow(DiskMonitor()) | of_mlflow(NetworkMonitor())
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        if name.removeprefix("system/") not in BUSY:
            assert ours[name] == pytest.approx(value, rel=0.05, abs=0.5), name
    assert 0 <= ours["system/cpu_utilization_percentage"] <= 100


def test_a_host_without_a_network_has_its_other_figures(monkeypatch):
    monkeypatch.setattr(load.psutil, "net_io_counters", lambda: None)
    ((_, ours),) = samples(())
    assert "system/cpu_utilization_percentage" in ours
    assert not [name for name in ours if "network" in name]


def test_traffic_is_counted_from_the_first_sample_on(monkeypatch):
    monkeypatch.setattr(load, "FIRST_SAMPLE_SECONDS", 0.2)
    found = []
    with log_system_metrics(lambda metrics, number: found.append(metrics["system/network_receive_megabytes"]), ()):
        until(lambda: found, "a sample")
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as here:
            there, _ = server.accept()
            with there:
                threading.Thread(target=here.sendall, args=(bytes(5_000_000),), daemon=True).start()
                num_bytes = 0
                while num_bytes < 5_000_000:
                    num_bytes += len(there.recv(1 << 20))
        until(lambda: found[-1] >= 5, "the traffic")
    assert found[0] < 5
    assert found[-1] < 50


def test_the_gpus_figures_are_mlflows(boards):
    ((_, ours),) = samples(boards.UUIDS)
    theirs = of_mlflow(gpu_monitor.GPUMonitor())
    assert len(theirs) == 7
    assert {name: value for name, value in ours.items() if "gpu" in name} == theirs
    ((_, one),) = samples(boards.UUIDS[1:])
    told = {name for name in one if "gpu" in name}
    assert told == {"system/gpu_1_memory_usage_percentage", "system/gpu_1_memory_usage_megabytes"}, "by NVML's index"


def test_it_goes_on_until_the_body_ends(monkeypatch):
    monkeypatch.setattr(load, "FIRST_SAMPLE_SECONDS", 0.01)
    found = []
    with log_system_metrics(lambda metrics, number: found.append(number), ()):
        until(lambda: len(found) >= 3, "samples")
    assert found == list(range(len(found)))
    assert len(found) <= load.FIRST_SAMPLES
