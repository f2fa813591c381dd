"""Two hosts, each with a network, a host name and processes of its own: preparation and training across them."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from distributed import Client

from paceline.conf.lightning import EXECUTION, FIXED
from paceline.conf.load import load, validate
from paceline.tasks.data.prepare import chunks, store
from paceline.tasks.data.prepare import dask_graph as graph
from paceline.tasks.data.sources import registry as source
from paceline.tasks.evaluate.metrics import evaluate_predictions, read_test_split
from paceline.tasks.train.launch.coordinator import TrainJob, train_group
from paceline.tasks.train.launch.module_data import prepare_on_hosts
from paceline.tasks.train.launch.rank_process import running_ranks
from paceline.tasks.train.lightning import code
from tests.support.hosts import ROOT, skip_unless_permitted, two_hosts
from tests.support.patience import until

CHECKPOINT_STEPS = 10  # an epoch has 21
OWN_CODE = """
import os
from pathlib import Path

import lightning.pytorch as pl


class Data(pl.LightningDataModule):
    def __init__(self, per_node: bool):
        super().__init__()
        self.prepare_data_per_node = per_node

    def prepare_data(self):
        with (Path(__file__).parent / "hosts.txt").open("a") as file:
            print(os.uname().nodename, file=file)
"""
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


@pytest.mark.parametrize(("per_node", "where"), [(True, ["host-a", "host-b"]), (False, ["host-a"])])
def test_own_data_are_prepared_once_on_each_host_or_on_one(hosts, tmp_path, per_node, where):
    data = {"class_path": "lit.Data", "init_args": {"per_node": per_node}}
    settings = {"model": {"class_path": "lightning.pytorch.demos.boring_classes.BoringModel"}, "data": data}
    tree = {
        "lightning": {"settings": settings, "code": str(tmp_path)},
        "cluster": {"kind": "address", "address": hosts.address},
    }
    config = validate(tree | {"execution": EXECUTION, "speedup": FIXED["speedup"]})
    job = TrainJob.model_construct(config=config, run_id="prepared", home=str(tmp_path))
    copied = job.directory / code.FOLDER
    copied.mkdir(parents=True)
    (copied / "lit.py").write_text(OWN_CODE)
    assert len(prepare_on_hosts(job, hosts.address)) == 2
    assert sorted((copied / "hosts.txt").read_text().split()) == where


def ranks_on(hosts, letter, job):
    """Process ids of a job's ranks on a host."""
    return sorted({process.pid for process in hosts.processes(letter)} & set(running_ranks(job.run_id)))


def num_executed(hosts):
    """Tasks that each worker has run in its life."""
    with Client(hosts.address, set_as_default=False) as client:
        return client.run(lambda dask_worker: dask_worker.state.executed_count)


def test_both_hosts_prepare(hosts, tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "MAX_ROWS", 100)  # 18 shards, up to four for a task: enough for both
    data = load("digits").data
    before = num_executed(hosts)
    prepared = graph.prepare(source.list_samples(data), data, tmp_path, hosts.address)
    assert not prepared.reused
    assert store.verify(Path(prepared.path)) == ()
    executed = {worker: number - before[worker] for worker, number in num_executed(hosts).items()}
    assert len(executed) == 2
    assert min(executed.values()) > 0
    assert sum(executed.values()) >= 5


def test_both_hosts_train_and_predict_every_sample_once(hosts, across):
    job, result = across
    assert result.hosts == ("host-a", "host-b")
    assert (result.world_size, len(result.predictions)) == (2, 2)
    truth = read_test_split(Path(job.prepared.path), job.prepared.class_names)
    found = evaluate_predictions(result.predictions, truth, 1.0)  # refuses missing and repeated samples
    assert found.num_samples == job.prepared.num_test
    assert [ranks_on(hosts, letter, job) for letter in hosts.hosts] == [[], []]


def test_two_hosts_train_bit_for_bit_as_one_does(across, make_job, cluster_address):
    _, two = across
    one = train_group(make_job(*ALIKE, "execution.num_devices=2"), cluster_address)
    assert len(set(one.hosts)) == 1
    assert two.losses == one.losses
    assert two.validation_scores == one.validation_scores
    weights = [torch.load(result.weights, weights_only=True) for result in (one, two)]
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]), name


def test_hosts_leave_nothing_behind_when_their_maker_is_killed():
    skip_unless_permitted()
    program = "from tests.support.hosts import lan\nwith lan() as (a, b): print(a.pid, b.pid, flush=True); input()"
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


@pytest.mark.slow
@pytest.mark.timeout(600)  # three starts of two ranks, and Dask's time-outs
def test_a_cut_link_costs_a_few_steps_and_no_accuracy(hosts, make_job):
    """`b` is out of reach in the middle of an epoch, comes back, and the run ends as if nothing had been."""
    settings = [*ALIKE, "execution.num_nodes=2", f"execution.checkpoint_steps={CHECKPOINT_STEPS}"]
    settings += ["recipe.num_epochs=20"]
    uninterrupted = train_group(make_job(*settings, address=hosts.address), hosts.address)
    job = make_job(*settings, address=hosts.address)
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train_group, job, hosts.address)
        saved = job.directory / "checkpoints"
        until(lambda: len(list(saved.glob("step-*.ckpt"))) >= 2 or training.done(), "checkpoints", every=0.05)
        hosts.cut("b")
        assert not training.done(), "it was cut too late"
        # Nobody can reach the rank on `b` to end it: its worker, which has lost the scheduler, must.
        until(lambda: not ranks_on(hosts, "b", job) and not hosts.worker_runs("b"), "end of host b", every=0.05)
        hosts.restore("b")
        hosts.restart_worker("b")
        result = training.result(timeout=240)
    assert result.losses == uninterrupted.losses
    assert result.validation_scores == uninterrupted.validation_scores
    assert result.first_step > 0
    assert len(result.restarts) == 1
    assert result.restarts[0].cause
    assert 0 <= result.restarts[0].lost_steps <= CHECKPOINT_STEPS
    assert [ranks_on(hosts, letter, job) for letter in hosts.hosts] == [[], []]
