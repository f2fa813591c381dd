"""The least memory traffic of a step, against a count by hand."""

import pytest

from paceline.conf.recipe import Recipe
from paceline.tasks.records.cost import Cost
from paceline.tasks.train.rank.device_limit import CACHED_BYTES, bytes_per_sample
from tests.support.reports import make_report

COST = Cost(
    forward_flops=1e9,
    training_flops=3e9,
    num_parameters=3_000_000,
    num_trained=1_000_000,
    saved_values=500_000,
    saved_bytes=100_000,
    image_bytes=3072,
)
PLAN = make_report(None).plan.model_copy(update={"precision": "32-true", "strategy": "single"})
NUM_SAMPLES = 256
STORED = {"32-true": 4, "tf32": 4, "bf16-mixed": 2, "16-mixed": 2, "64-true": 8}


def traffic(recipe=None, num_samples=NUM_SAMPLES, cost=COST, **plan):
    bytes_moved = bytes_per_sample(cost, PLAN.model_copy(update=plan), Recipe(**(recipe or {})), num_samples)
    return bytes_moved and bytes_moved * num_samples


@pytest.mark.parametrize("precision", STORED)
def test_stored_values_are_written_and_read_in_their_type(precision):
    weight_bytes = 8 if precision == "64-true" else 4
    weights = weight_bytes * (3_000_000 + (2 + 2 + 2) * 1_000_000)  # SGD has one momentum
    stored = 2 * NUM_SAMPLES * (500_000 * STORED[precision] + 100_000)
    assert traffic(precision=precision) == pytest.approx(weights + stored)


def test_an_optimizer_reads_and_writes_its_state():
    plain = traffic({"momentum": 0.0})
    assert traffic() - plain == pytest.approx(2 * 4e6)
    assert traffic({"optimizer": "adamw"}) - plain == pytest.approx(4 * 4e6)


def test_no_bound_is_given_where_tensors_may_stay_in_a_cache_or_are_not_known():
    small = COST.model_copy(update={"saved_values": 0.0, "saved_bytes": 0.0})
    assert traffic(cost=small) is None
    assert traffic() > CACHED_BYTES
    assert (traffic(compile="step"), traffic(strategy="fsdp")) == (None, None)
    assert traffic(compile="graph") == traffic()
