import pytest

from paceline.conf.cluster import Cluster
from paceline.tasks.cluster import gpu_workers, local
from paceline.tasks.cluster.client import ClusterResources, call_workers, connect, workers
from paceline.tasks.records.hardware import Gpu, Hardware
from paceline.tasks.train.launch.layout import gpus_of_workers

UUIDS = ["GPU-a", "GPU-b", "GPU-c"]


def visible():
    import os

    return os.environ.get("CUDA_VISIBLE_DEVICES"), "dask_cuda" in __import__("sys").modules


@pytest.fixture
def three_gpus(monkeypatch):
    gpus = tuple(Gpu(uuid=uuid, name="X", memory_bytes=1, compute_capability=(9, 0)) for uuid in UUIDS)
    host = Hardware(host="h", cpu_name="", num_cores=1, memory_bytes=1, cpu_bf16=False, gpus=gpus)
    monkeypatch.setattr(gpu_workers, "describe", lambda: host)
    monkeypatch.setattr(local, "describe", lambda: host)


@pytest.mark.usefixtures("three_gpus")
def test_each_worker_sees_its_own_gpu_first_in_one_cluster_after_another():
    demand = ClusterResources(num_hosts=1, workers_per_host=2, gpus=True)
    for _ in range(2):
        with (
            local.open_local(Cluster(kind="local_cuda", tls="off"), demand, None) as address,
            connect(address) as client,
        ):
            answers = call_workers(client, [(worker, visible, ()) for worker in workers(client)], 30)
        settings = [setting for setting, _ in answers]
        assert sorted(settings) == ["GPU-a,GPU-b,GPU-c", "GPU-b,GPU-c,GPU-a"]
        assert sorted(gpus_of_workers([(UUIDS, setting) for setting in settings])) == ["GPU-a", "GPU-b"]
        assert not any(is_loaded for _, is_loaded in answers)
