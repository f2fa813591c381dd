"""A cluster that is opened beside other work: what its user learns of it, and when it ends."""

import threading

import psutil

from paceline.conf.cluster import Cluster
from paceline.conf.environment import Environment
from paceline.tasks.cluster.client import ClusterResources
from paceline.tasks.cluster.kinds import Opening
from tests.support.refusals import refused

ONE = ClusterResources(num_hosts=1, workers_per_host=1, gpus=False)


def workers():
    """Of any cluster that this process has, those of other tests included."""
    return {child for child in psutil.Process().children(recursive=True) if "spawn_main" in str(child.cmdline())}


def test_it_ends_once_it_is_released_and_whatever_came_of_its_preparation():
    prepared, others = threading.Event(), workers()

    def prepare(address):
        assert address.startswith("tls://127.0.0.1:")
        prepared.set()
        raise OSError("left to whoever needs it")

    opening = Opening(Cluster(num_workers=1), ONE, Environment(), prepare)
    assert opening.address().startswith("tls://127.0.0.1:")
    assert prepared.wait(30)
    assert len(workers() - others) == 1
    opening.release()
    opening.close()
    assert workers() - others == set()


def test_what_refuses_it_is_told_to_who_needs_it(monkeypatch, tmp_path):
    monkeypatch.setenv("PACELINE_TLS", str(tmp_path))
    opening = Opening(Cluster(kind="ssh", hosts=("127.0.0.1",)), ONE, Environment(), print)
    with refused("PACELINE_TLS", "infra/certificates"):
        opening.address()
    opening.close()
