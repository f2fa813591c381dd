import pytest

from paceline.conf.execution import Execution
from paceline.tasks.cluster.client import ClusterResources, demand_of


@pytest.mark.parametrize("hosts", [1, 2, 3, 4])
@pytest.mark.parametrize("devices", range(1, 9))
def test_a_worker_is_a_device(hosts, devices):
    demand = demand_of([Execution(num_nodes=hosts, num_devices=devices)], "cpu")
    assert demand == ClusterResources(num_hosts=hosts, workers_per_host=devices, gpus=False)
    assert demand.num_workers == hosts * devices
    full = {f"host{index}": devices for index in range(hosts)}
    assert demand.is_met(full)
    assert demand.is_met(full | {"spare": devices})
    assert not demand.is_met(full | {"host0": devices - 1})
    assert not demand.is_met({"host0": hosts * devices + 1}) or hosts == 1


def test_a_study_asks_for_its_largest_arm_in_each_direction():
    demand = demand_of([Execution(num_nodes=4, num_devices=1), Execution(num_nodes=1, num_devices=8)], "gpu")
    assert demand == ClusterResources(num_hosts=4, workers_per_host=8, gpus=True)
