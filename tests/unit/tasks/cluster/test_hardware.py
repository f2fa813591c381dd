import pytest

from paceline.tasks.cluster.hardware import describe, visible
from paceline.tasks.records.hardware import Gpu
from tests.support.refusals import refused


def gpus(count):
    return [Gpu(uuid=f"GPU-{i}", name="X", memory_bytes=1, compute_capability=(9, 0)) for i in range(count)]


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
    assert [gpu.uuid for gpu in visible(gpus(3), setting)] == left


def test_this_host_is_described():
    here = describe()
    assert here.num_cores >= 1
    assert here.memory_bytes > 2**28
    assert here.cpu_name


def test_parts_of_gpus_are_refused_and_beginnings_of_names_are_names():
    (first, *_) = found = gpus(3)
    assert visible(found, first.uuid[:-1]) == tuple(gpu for gpu in found if gpu.uuid.startswith(first.uuid[:-1]))
    with refused("CUDA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES=MIG-1"):
        visible(found, "MIG-1")
