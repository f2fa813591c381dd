import json
import shlex
import subprocess
import sys
from contextlib import suppress

import pytest
from pydantic import ValidationError

from paceline.conf.cluster import Cluster
from paceline.tasks.cluster.client import ClusterResources
from paceline.tasks.cluster.ssh import ssh_arguments
from paceline.tasks.cluster.tls import Certificates

FILES = Certificates(authority="/tls/ca.pem", certificate="/tls/cert.pem", key="/tls/key.pem")


def arguments_for(hosts, workers, gpus=False, certificates=None, **settings):
    cluster = Cluster(kind="ssh", hosts=[f"node{i}" for i in range(hosts)], **settings)
    demand = ClusterResources(num_hosts=hosts, workers_per_host=workers, gpus=gpus)
    return ssh_arguments(cluster, demand, certificates)


@pytest.mark.parametrize("hosts", [1, 2, 3, 4])
@pytest.mark.parametrize("devices", range(1, 9))
def test_cpu_workers(hosts, devices):
    arguments = arguments_for(hosts, devices)
    assert arguments["hosts"] == ["node0", *(f"node{i}" for i in range(hosts))]  # the scheduler's first
    assert arguments["worker_class"] == "distributed.Nanny"
    assert arguments["worker_options"]["n_workers"] == devices
    assert arguments["worker_options"]["nthreads"] == 1
    assert "preload_nanny" not in arguments["worker_options"]
    assert arguments["remote_python"] == shlex.quote(sys.executable)
    assert arguments["scheduler_options"]["protocol"] == "tcp://"


@pytest.mark.parametrize("hosts", [1, 2, 3, 4])
@pytest.mark.parametrize("devices", range(1, 9))
def test_each_gpu_worker_has_a_gpu_of_its_host(hosts, devices):
    arguments = arguments_for(hosts, devices, gpus=True)
    assert arguments["worker_class"] == "distributed.Nanny"
    assert arguments["worker_options"]["n_workers"] == devices
    assert arguments["worker_options"]["preload_nanny"] == ["paceline.tasks.cluster.gpu_workers"]


def test_tls_reaches_every_part_as_plain_data():
    arguments = arguments_for(2, 2, certificates=FILES, interface="eth0")
    sent = json.loads(json.dumps([arguments["scheduler_options"], arguments["worker_options"]]))  # as JSON it goes
    assert sent[0]["protocol"] == "tls://"
    for part, role in zip(sent, ("scheduler", "worker"), strict=True):
        assert part["interface"] == "eth0"
        assert part["dashboard_address"] == "127.0.0.1:0"
        assert part["security"] == {
            "require_encryption": True,
            "tls_ca_file": "/tls/ca.pem",
            f"tls_{role}_cert": "/tls/cert.pem",
            f"tls_{role}_key": "/tls/key.pem",
        }


def test_no_interface_runs_code_on_a_host(tmp_path):
    """Dask puts the options as JSON between single quotes, for the shell of the host."""
    marker = tmp_path / "marker"
    command = "true"
    with suppress(ValidationError):
        options = arguments_for(1, 1, interface=f"lo'; touch {marker}; '")["worker_options"]
        command = f"true --spec '{json.dumps(options)}'"
    subprocess.run(["sh", "-c", command], check=True)
    assert not marker.exists()
