import os

import pytest

from paceline.tasks.cluster.hardware import count_physical_cores, describe, visible
from paceline.tasks.records.hardware import Gpu
from tests.support.refusals import refused


def gpus(count):
    return [Gpu(uuid=f"GPU-{i}", name="X", memory_bytes=1, compute_capability=(9, 0)) for i in range(count)]


def boards(count):
    return [[gpu] for gpu in gpus(count)]


def slices(board, count):
    return [
        Gpu(uuid=f"MIG-{board}{i}", name="X 1g.5gb", memory_bytes=1, compute_capability=(9, 0), board=f"GPU-{board}")
        for i in range(count)
    ]


@pytest.mark.parametrize(
    ("setting", "left"),
    [
        (None, ["GPU-0", "GPU-1", "GPU-2"]),
        ("", []),
        ("-1", []),
        ("2", ["GPU-2"]),
        ("2,0,1", ["GPU-0", "GPU-1", "GPU-2"]),  # a worker's rotated list, unrotated
        ("GPU-1, GPU-0", ["GPU-0", "GPU-1"]),
    ],
)
def test_visible_devices_are_heeded_and_never_rotated(setting, left):
    assert [gpu.uuid for gpu in visible(boards(3), setting)] == left


@pytest.mark.parametrize(
    ("setting", "left"),
    [
        (None, ["MIG-a0", "MIG-a1", "GPU-0", "MIG-b0"]),
        ("MIG-a1,MIG-a0", ["MIG-a0", "MIG-a1"]),
        ("MIG-b", ["MIG-b0"]),  # the beginning of a UUID
        ("0", ["MIG-a0", "MIG-a1"]),
        ("GPU-b,1", ["GPU-0", "MIG-b0"]),
        ("MIG-none", []),
    ],
)
def test_slices_of_divided_gpus_are_devices(setting, left):
    assert [gpu.uuid for gpu in visible([slices("a", 2), gpus(1), slices("b", 1)], setting)] == left


@pytest.mark.parametrize(
    ("siblings", "number"),
    [
        ({0: "0,4", 1: "1,5", 4: "0,4", 5: "1,5"}, 2),
        ({0: "0", 1: "1"}, 2),
        ({0: "0-1", 1: "0-1", 2: "2"}, 2),  # only some cores have two threads
        ({}, None),
    ],
)
def test_hardware_threads_of_one_core_count_once(tmp_path, siblings, number):
    for core, text in siblings.items():
        topology = tmp_path / f"cpu{core}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{text}\n")
    assert count_physical_cores(siblings, tmp_path) == number


def test_only_the_cores_of_this_process_count():
    all_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(all_cores)})
    try:
        found = describe()
    finally:
        os.sched_setaffinity(0, all_cores)
    assert (found.num_cores, found.num_physical_cores) == (1, 1)


def test_this_host_is_described():
    here = describe()
    assert here.num_cores >= 1
    assert here.memory_bytes > 2**28
    assert here.cpu_name


def test_instances_are_refused_and_beginnings_of_names_are_names():
    found = boards(3)
    assert [gpu.uuid for gpu in visible(found, "GPU-")] == ["GPU-0", "GPU-1", "GPU-2"]
    with refused("CUDA_VISIBLE_DEVICES", "MIG-GPU-0/1/0"):
        visible(found, "MIG-GPU-0/1/0")
