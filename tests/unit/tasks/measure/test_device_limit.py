"""The limit of this machine's CPU, measured for a moment: what it says, not how fast the machine is."""

import pytest
import torch

from paceline.tasks.files import MeasurementCache
from paceline.tasks.measure.device_limit import limit_cache, measure_limit
from paceline.tasks.records.hardware import DeviceLimit
from paceline.tasks.records.record import Choice

CPU = torch.device("cpu")
SECONDS = 0.2


@pytest.fixture(scope="module")
def limit():
    return measure_limit(CPU, seconds=SECONDS)


def test_it_has_the_rates_that_a_cpu_has(limit):
    assert set(limit.flops_per_second) == {"32-true", "bf16-mixed"}
    assert all(rate > 1e7 for rate in limit.flops_per_second.values())
    assert limit.bytes_per_second > 1e7
    assert (limit.driver, limit.torch) == (None, torch.__version__)
    assert limit.num_threads == torch.get_num_threads()
    assert limit.device_name


def test_a_precision_is_measured_where_it_is_asked_for():
    assert "64-true" in measure_limit(CPU, ["64-true", "32-true"], seconds=SECONDS).flops_per_second


def test_it_leaves_the_random_numbers_and_the_precision_of_products_alone():
    before = torch.get_rng_state(), torch.get_float32_matmul_precision()
    measure_limit(CPU, seconds=0.0)
    assert torch.get_rng_state().equal(before[0])
    assert torch.get_float32_matmul_precision() == before[1]


def test_it_is_cached_by_device_and_threads(tmp_path, limit):
    cache = limit_cache(tmp_path, CPU)
    assert cache.find() is None
    cache.keep(limit)
    assert limit_cache(tmp_path, CPU).find() == limit
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert limit_cache(tmp_path, CPU).find() is None
    finally:
        torch.set_num_threads(threads)


def test_a_cache_ignores_what_it_cannot_read(tmp_path, limit):
    facts = {"device": "one"}
    MeasurementCache(tmp_path, facts, DeviceLimit).keep(limit)
    assert MeasurementCache(tmp_path, facts, Choice).find() is None, "of another kind"
    assert MeasurementCache(tmp_path, {"device": "two"}, DeviceLimit).find() is None
    (file,) = (tmp_path / "searches").iterdir()
    file.write_text("{")
    assert MeasurementCache(tmp_path, facts, DeviceLimit).find() is None
