"""Averaged weights, growing images and activation checkpointing in trainings through Dask."""

import pytest
import torch

from paceline.tasks.train.launch.coordinator import train_group
from paceline.tasks.train.rank.checkpoint_io import load
from tests.integration.run.test_training import check_golden, weights
from tests.support.jobs import changed

GROWING = (
    "recipe.ema=0.9",
    "recipe.progressive_size=8",
    "recipe.num_epochs=4",
    "recipe.augment=shift",
    "execution.checkpoint_steps=10",
)


@pytest.fixture(scope="module")
def uninterrupted(make_job, cluster_address):
    job = make_job(*GROWING)
    return job, train_group(job, cluster_address)


@pytest.mark.slow
def test_averages_and_sizes_go_on_bit_for_bit(uninterrupted, cluster_address):
    """From step 80 of 84: two stages of growth before it, the last one behind it."""
    job, first = uninterrupted
    expected = weights(first)
    (job.checkpoints / "step-0000000084.ckpt").unlink()
    resumed = train_group(job.model_copy(update={"resume": True}), cluster_address)
    assert resumed.first_step == 80
    assert resumed.losses == first.losses
    assert resumed.validation_scores == first.validation_scores
    for name, tensor in expected.items():
        assert torch.equal(tensor, weights(resumed)[name]), name


def test_the_saved_weights_are_the_average_and_the_checkpoint_has_both(uninterrupted):
    job, result = uninterrupted
    (path,) = [path for path in job.checkpoints.glob("*.ckpt") if path.stem.endswith("84")]
    checkpoint = load(path)
    state, sums = checkpoint["state_dict"], checkpoint["paceline"]["ema"]
    for name, tensor in weights(result).items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, sums[name] / (1 - 0.9**84))
            assert not torch.allclose(tensor, state[f"network.{name}"]), name


@pytest.mark.slow
def test_small_images_are_another_training_and_the_average_is_not(make_job, cluster_address, uninterrupted):
    job, first = uninterrupted
    only_average = train_group(make_job(*GROWING, "recipe.progressive_size=null"), cluster_address)
    neither = train_group(make_job(*GROWING, "recipe.progressive_size=null", "recipe.ema=null"), cluster_address)
    assert only_average.losses == neither.losses != first.losses
    assert only_average.validation_scores != neither.validation_scores
    assert changed(job, recipe={"ema": None}).config.recipe.ema is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks",
    [
        (),
        ("execution.num_devices=2",),
        ("execution.num_devices=2", "execution.strategy=fsdp"),
    ],
    ids=["one", "ddp", "fsdp"],
)
def test_activations_that_are_computed_again_change_no_loss(make_job, cluster_address, ranks):
    result = train_group(
        make_job("recipe.augment=shift", *ranks, "execution.activation_checkpointing=on"), cluster_address
    )
    assert result.plan is None or result.plan.activation_checkpointing
    if not ranks:
        check_golden("digits", result.losses)
        return
    plain = train_group(make_job("recipe.augment=shift", *ranks), cluster_address)
    assert result.losses == plain.losses
    assert result.validation_scores == plain.validation_scores
