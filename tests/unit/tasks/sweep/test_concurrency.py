"""How many trials run at once, and what each of them has."""

from paceline.conf.load import load
from paceline.tasks.records.hardware import Gpu
from paceline.tasks.sweep.concurrency import plan_concurrency
from tests.support.refusals import refused
from tests.support.studies import HARDWARE

GIB = 2**30
HOST = HARDWARE.model_copy(update={"num_cores": 8, "memory_bytes": 64 * GIB})
GPUS = tuple(Gpu(uuid=f"GPU-{n}", name="H200", memory_bytes=141 * GIB, compute_capability=(9, 0)) for n in range(4))


def room(*overrides, hardware=HOST, accelerator="cpu", num_trials=20, asked=None, workers=None):
    return plan_concurrency(load("digits", list(overrides)), hardware, accelerator, num_trials, asked, workers)


def test_cores_are_shared_evenly():
    found = room()
    assert found.num_at_once == 8
    assert (found.share.num_cores, found.share.memory_bytes) == (1, 8 * GIB)
    assert (found.demand.num_hosts, found.demand.workers_per_host) == (1, 8)
    half = room(asked=2)
    assert (half.num_at_once, half.share.num_cores) == (2, 4)


def test_a_trial_may_have_several_devices():
    found = room("execution.num_devices=4")
    assert found.num_at_once == 2
    assert found.demand.workers_per_host == 8
    assert found.share.num_cores == 4


def test_there_are_no_more_at_once_than_trials_or_memory():
    few = room(num_trials=3)
    assert few.num_at_once == 3
    assert few.share.num_cores == 2
    assert "as many as there are trials" in few.at_once.reason
    small = room(hardware=HOST.model_copy(update={"memory_bytes": 5 * GIB}))
    assert small.num_at_once == 3
    assert "5 GiB of memory" in small.at_once.reason


def test_a_gpu_for_each():
    found = room(hardware=HOST.model_copy(update={"gpus": GPUS}), accelerator="gpu")
    assert found.num_at_once == 4
    assert found.demand.gpus
    assert found.share.num_cores == 2, "threads that feed four GPUs share the cores"
    assert found.share.gpus == GPUS


def test_hosts_and_workers_that_are_there_count():
    hosts = ["cluster.kind=ssh", "cluster.hosts=[a,b,c]"]
    assert room(*hosts, num_trials=50).num_at_once == 24
    spread = room(*hosts, asked=4)
    assert (spread.demand.num_hosts, spread.demand.workers_per_host) == (3, 2)
    assert room("cluster.num_workers=3").num_at_once == 3
    joined = room("cluster.kind=address", "cluster.address=tcp://h:1", workers={"a": 2, "b": 2})
    assert joined.num_at_once == 4
    assert joined.share.num_cores == 4
    assert room("cluster.kind=address", "cluster.address=tcp://h:1", workers={}).num_at_once == 1


def test_more_than_fit_are_refused():
    with refused("--at-once", 9, 8, 1):
        room(asked=9)
