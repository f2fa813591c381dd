"""Sharded training on two real gloo ranks: the losses of unsharded training, checkpoints in parts, an exact resume."""

import shutil

import numpy as np
import pytest
import torch

from paceline.tasks.train.launch.coordinator import train_group
from paceline.tasks.train.rank.checkpoint_io import load, load_full
from tests.support.jobs import changed

TWO = ("execution.num_devices=2", "recipe.augment=shift", "execution.checkpoint_steps=15")


@pytest.fixture(scope="module")
def sharded(make_job, cluster_address):
    job = make_job(*TWO, "execution.strategy=fsdp", "recipe.ema=0.9")
    return job, train_group(job, cluster_address)


@pytest.fixture
def interrupted(sharded, tmp_path):
    """The job as if a rank had been killed while it wrote its part of the last checkpoint."""
    job, _ = sharded
    copy = tmp_path / "runs" / job.run_id / "checkpoints"
    shutil.copytree(job.checkpoints, copy)
    (copy / "step-0000000042.ckpt" / "part-1-of-2.pt").unlink()
    return job.model_copy(update={"home": str(tmp_path), "resume": True})


def weights(result):
    return torch.load(result.weights, weights_only=True)


def assert_close(one, other, tolerance):
    np.testing.assert_allclose(one.losses, other.losses, rtol=tolerance)
    np.testing.assert_allclose(one.validation_scores, other.validation_scores, atol=0.03)
    for name, tensor in weights(other).items():
        torch.testing.assert_close(weights(one)[name], tensor, rtol=1e-2, atol=tolerance)


@pytest.mark.slow
def test_sharded_training_is_data_parallel_training(sharded, make_job, cluster_address):
    _, one = sharded
    other = train_group(make_job(*TWO, "execution.strategy=ddp", "recipe.ema=0.9"), cluster_address)
    assert_close(one, other, 1e-3)
    assert one.communication_fraction is None, "not timed, which is not nought"


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_weights_that_are_gathered_in_bf16_give_the_losses_of_autocast(make_job, cluster_address, optimizer):
    settings = (*TWO, "execution.precision=bf16-mixed", f"recipe.optimizer={optimizer}", "recipe.learning_rate=0.01")
    one, other = (
        train_group(make_job(*settings, f"execution.strategy={strategy}"), cluster_address)
        for strategy in ("fsdp", "ddp")
    )
    assert_close(one, other, 0.02)


def test_a_sharded_training_resumes_bit_for_bit(sharded, interrupted, cluster_address):
    _, first = sharded
    expected = weights(first)
    assert sorted(path.name for path in (interrupted.checkpoints / "step-0000000030.ckpt").iterdir()) == [
        "part-0-of-2.pt",
        "part-0-of-2.pt.sha256",
        "part-1-of-2.pt",
        "part-1-of-2.pt.sha256",
    ]
    state = load_full(interrupted.checkpoints / "step-0000000030.ckpt")["state_dict"]
    assert {name: one.shape for name, one in state.items()} == {
        f"network.{name}": one.shape for name, one in expected.items()
    }
    resumed = train_group(interrupted, cluster_address)
    assert resumed.first_step == 30
    assert resumed.losses == first.losses
    for name, tensor in expected.items():
        if "running_" in name:  # averaged over the ranks at a checkpoint inside an epoch too, and rounded
            torch.testing.assert_close(weights(resumed)[name], tensor, rtol=0.1, atol=0.02)
        else:
            assert torch.equal(tensor, weights(resumed)[name]), name


@pytest.mark.slow
def test_another_number_of_ranks_takes_up_a_sharded_checkpoint(sharded, interrupted, cluster_address):
    _, first = sharded
    one = changed(interrupted, execution={"num_devices": 1})
    plan = one.plan.model_copy(update={"world_size": 1, "strategy": "single"})
    resumed = train_group(one.model_copy(update={"plan": plan}), cluster_address)
    assert resumed.first_step == 30
    np.testing.assert_allclose(resumed.losses, first.losses, rtol=0.05)  # batch norms see twice the samples
    assert load(one.checkpoints / "step-0000000042.ckpt")["global_step"] == 42, "one file again"
    two = train_group(interrupted, cluster_address)
    assert two.first_step == 42
    for name, tensor in weights(resumed).items():
        torch.testing.assert_close(weights(two)[name], tensor)


@pytest.mark.slow
def test_layers_that_are_not_trained_are_sharded_too(make_job, cluster_address):
    whitened = (*TWO, "model.name=whitened", "model.test_views=2", "recipe.num_epochs=1")
    one, other = (
        train_group(make_job(*whitened, f"execution.strategy={strategy}"), cluster_address)
        for strategy in ("fsdp", "ddp")
    )
    np.testing.assert_allclose(one.losses, other.losses, rtol=1e-3)
