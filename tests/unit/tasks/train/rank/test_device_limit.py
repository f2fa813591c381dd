"""The least memory traffic of a step, against a count by hand; and what is said where something is not known."""

import os
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from paceline.conf.load import load
from paceline.conf.recipe import Recipe
from paceline.tasks.model.networks.registry import build_network
from paceline.tasks.records.cost import Cost
from paceline.tasks.train.rank import device_limit
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


def context(tmp_path, *overrides):
    """As much of a rank as the share needs: the CIFAR network of one stage, on the CPU."""
    config = load("digits", ["model.width=4", "model.depth=1", *overrides])
    return SimpleNamespace(
        writes=True,
        config=config,
        prepared=SimpleNamespace(picture_shape=(16, 16, 1)),
        spec=SimpleNamespace(
            plan=PLAN.model_copy(update={"num_threads": 1}),
            home=str(tmp_path),
            may_measure_limit=True,
        ),
        new_network=lambda: build_network(config.model, (16, 16, 1), 10, 0),
        batches=SimpleNamespace(global_batch_size=64, num_samples=640, world_size=1),
        device=torch.device("cpu"),
        own_processes=lambda: [os.getpid()],
        gpu_uuids=tuple,
    )


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_device_that_fails_after_the_training_leaves_the_share_unknown(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("CUDA error: an illegal\nmemory access")

    monkeypatch.setattr(device_limit, "measure_limit", fail)
    facts = device_limit.limit_facts(context(tmp_path))
    assert facts["cost"].training_flops > 0
    assert facts["uncounted"] == "the device's limit could not be measured: CUDA error: an illegal memory access"
    assert "limit" not in facts


def test_a_home_that_cannot_be_written_is_measured_again(tmp_path, monkeypatch):
    quick = partial(device_limit.measure_limit, seconds=0.0)
    monkeypatch.setattr(device_limit, "measure_limit", quick)
    (tmp_path / "searches").write_text("no directory")
    assert device_limit.limit_facts(context(tmp_path))["limit"].num_threads == 1


def test_a_limit_is_not_measured_next_to_other_trainings(tmp_path):
    trial = context(tmp_path)
    trial.spec.may_measure_limit = False
    facts = device_limit.limit_facts(trial)
    assert facts["uncounted"] == "the device's limit could not be measured: other trainings may use the host"
    assert not (tmp_path / "searches").exists()


def test_steps_of_growing_images_have_no_share_without_a_probe(tmp_path):
    growing = context(tmp_path, "recipe.progressive_size=8", "data.image_size=16", "speedup.baseline=none")
    assert "recipe.progressive_size" in device_limit.limit_facts(growing)["uncounted"]


def test_a_frozen_part_costs_no_backward_pass(tmp_path, monkeypatch):
    monkeypatch.setattr(device_limit, "measure_limit", partial(device_limit.measure_limit, seconds=0.0))
    freezing = ("model.pretrained=weights.pt", "model.freeze=backbone")
    trained, frozen = (device_limit.limit_facts(context(tmp_path, *more))["cost"] for more in ((), freezing))
    assert frozen.training_flops < trained.training_flops / 2
    assert frozen.num_trained < trained.num_trained
