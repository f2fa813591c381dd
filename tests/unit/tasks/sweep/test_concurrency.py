"""How many trials run at once, what each of them has, and what is measured of models side by side."""

import pytest

from paceline.conf.load import load
from paceline.tasks.records.hardware import Gpu
from paceline.tasks.records.measurement import Block, ProbeResult
from paceline.tasks.sweep.concurrency import (
    ALONE,
    BESIDE,
    TOGETHER,
    WHOLE,
    colocation_of,
    judge_colocation,
    plan_concurrency,
)
from paceline.tasks.train.plan import resolve
from tests.support.refusals import refused
from tests.support.studies import HARDWARE

GIB = 2**30
HOST = HARDWARE.model_copy(update={"num_cores": 8, "memory_bytes": 64 * GIB})
TWO_CORES = HARDWARE.model_copy(update={"num_cores": 2})
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


def test_physical_cores_are_shared_too():
    found = room(hardware=HOST.model_copy(update={"num_physical_cores": 4}), asked=2)
    assert (found.share.num_cores, found.share.num_physical_cores) == (4, 2)


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


def arms():
    plan = resolve(load("digits", ["execution.num_devices=2"]), TWO_CORES, 1293)
    return colocation_of(plan, 129, 2).arms


def test_four_ways_to_use_two_cores():
    found = arms()
    assert {role: (arm.num_devices, arm.batch_size, arm.variant, arm.num_threads) for role, arm in found.items()} == {
        ALONE: (1, 129, "full", None),
        BESIDE: (2, 129, "no_sync", None),
        TOGETHER: (2, 64, "full", None),
        WHOLE: (1, 129, "full", 2),
    }


def probe(seconds, num_rounds=8):
    """Rounds in which an arm takes so many seconds per sample."""
    found = arms()
    return ProbeResult(
        baseline=found.pop(ALONE),
        candidate=found.pop(BESIDE),
        others=found,
        batch_size=129,
        rounds=tuple(
            tuple(Block(arm=role, seconds_per_sample=each * (1 + number / 1000), num_steps=5) for role, each in seconds)
            for number in range(num_rounds)
        ),
        seconds=9.0,
        stopped_because="all blocks done",
    )


def test_ratios_are_of_samples_per_second():
    found = judge_colocation(probe([(ALONE, 1.0), (BESIDE, 0.5), (TOGETHER, 0.8), (WHOLE, 0.6)]))
    assert found.over_alone.value == pytest.approx(2.0)
    assert found.over_together.value == pytest.approx(1.6)
    assert found.over_whole.value == pytest.approx(1.2)
    assert found.over_best == found.over_whole
    assert found.layout == "one model per device"


def test_what_was_not_measured_is_unknown():
    assert judge_colocation(probe([(ALONE, 1.0), (BESIDE, 0.5)])) is None
    assert judge_colocation(probe([(ALONE, 1.0), (BESIDE, 0.5), (TOGETHER, 0.8)])).over_whole is None
