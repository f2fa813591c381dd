"""Two hosts, each with a network, a host name and processes of its own: preparation and training across them."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from distributed import Client

from conf.load import load
from tasks.data import graph, source, store
from tasks.evaluate.metrics import evaluate_predictions, read_test_split
from tasks.train.coordinate import train_group
from tasks.train.supervise import running_ranks
from tests.hosts import ROOT, skip_unless_permitted, two_hosts

ALIKE = ["recipe.augment=shift", "execution.num_threads=1"]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with two_hosts(tmp_path_factory.mktemp("hosts")) as both:
        yield both


@pytest.fixture(scope="module")
def across(hosts, make_job):
    """A training with one rank on each host."""
    job = make_job(*ALIKE, "execution.num_nodes=2", address=hosts.address)
    return job, train_group(job, hosts.address)


def num_executed(hosts):
    """Tasks that each worker has run in its life."""
    with Client(hosts.address, set_as_default=False) as client:
        return client.run(lambda dask_worker: dask_worker.state.executed_count)


def test_both_hosts_prepare(hosts, tmp_path, monkeypatch):
    monkeypatch.setattr(graph, "MAX_ROWS", 100)  # 18 shards or more: enough for both
    data = load("digits").data
    before = num_executed(hosts)
    prepared = graph.prepare(source.list_samples(data), data, tmp_path, hosts.address)
    assert not prepared.reused
    assert store.verify(Path(prepared.path)) == ()
    executed = {worker: number - before[worker] for worker, number in num_executed(hosts).items()}
    assert len(executed) == 2
    assert min(executed.values()) > 0
    assert sum(executed.values()) >= 18


def test_both_hosts_train_and_predict_every_sample_once(hosts, across):
    job, result = across
    assert result.hosts == ("host-a", "host-b")
    assert (result.world_size, len(result.predictions)) == (2, 2)
    truth = read_test_split(Path(job.prepared.path), job.prepared.class_names)
    found = evaluate_predictions(result.predictions, truth, 1.0)  # refuses missing and repeated samples
    assert found.num_samples == job.prepared.num_test
    for letter in hosts.hosts:
        assert not {process.pid for process in hosts.processes(letter)} & set(running_ranks(job.run_id))


def test_two_hosts_train_bit_for_bit_as_one_does(across, make_job, cluster_address):
    _, two = across
    one = train_group(make_job(*ALIKE, "execution.num_devices=2"), cluster_address)
    assert len(set(one.hosts)) == 1
    assert two.losses == one.losses
    assert two.validation_accuracy == one.validation_accuracy
    weights = [torch.load(result.weights, weights_only=True) for result in (one, two)]
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]), name


def test_hosts_leave_nothing_behind_when_their_maker_is_killed():
    skip_unless_permitted()
    program = "from tests.hosts import lan\nwith lan() as (a, b): print(a.pid, b.pid, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as maker:
        pids = [int(pid) for pid in maker.stdout.readline().split()]
        link = Path(f"/sys/class/net/paceline{pids[0]}")
        assert link.exists()
        assert all(psutil.pid_exists(pid) for pid in pids)
        maker.kill()
    deadline = time.monotonic() + 20
    while (link.exists() or any(psutil.pid_exists(pid) for pid in pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not link.exists()
    assert not any(psutil.pid_exists(pid) for pid in pids)
