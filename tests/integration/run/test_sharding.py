"""Sharded training on two real gloo ranks: the losses of unsharded training, ordinary checkpoints, an exact resume."""

import numpy as np
import pytest
import torch

from paceline.tasks.train.launch.coordinator import train_group
from paceline.tasks.train.rank.checkpoint_io import load

TWO = ("execution.num_devices=2", "recipe.augment=shift", "execution.checkpoint_steps=15")


@pytest.fixture(scope="module")
def sharded(make_job, cluster_address):
    job = make_job(*TWO, "execution.strategy=fsdp")
    return job, train_group(job, cluster_address)


def weights(result):
    return torch.load(result.weights, weights_only=True)


@pytest.mark.slow
def test_sharded_training_is_data_parallel_training(sharded, make_job, cluster_address):
    _, one = sharded
    other = train_group(make_job(*TWO, "execution.strategy=ddp"), cluster_address)
    np.testing.assert_allclose(one.losses, other.losses, rtol=1e-3)
    np.testing.assert_allclose(one.validation_scores, other.validation_scores, atol=0.02)
    for name, tensor in weights(other).items():
        torch.testing.assert_close(weights(one)[name], tensor, rtol=1e-2, atol=1e-3)
    assert one.communication_fraction is None, "not timed, which is not nought"


def test_a_sharded_training_resumes_bit_for_bit_from_one_ordinary_file(sharded, cluster_address):
    job, first = sharded
    expected = weights(first)
    checkpoints = job.directory / "checkpoints"
    (checkpoints / "step-0000000042.ckpt").unlink()
    content = load(checkpoints / "step-0000000030.ckpt")
    assert {type(tensor) for tensor in content["state_dict"].values()} == {torch.Tensor}
    assert {name: one.shape for name, one in content["state_dict"].items()} == {
        f"network.{name}": one.shape for name, one in expected.items()
    }
    resumed = train_group(job.model_copy(update={"resume": True}), cluster_address)
    assert resumed.first_step == 30
    assert resumed.losses == first.losses
    for name, tensor in expected.items():
        if "running_" in name:  # a checkpoint inside an epoch holds rank 0's statistics, sharded or not
            torch.testing.assert_close(weights(resumed)[name], tensor, rtol=0.1, atol=0.02)
        else:
            assert torch.equal(tensor, weights(resumed)[name]), name


@pytest.mark.slow
def test_layers_that_are_not_trained_are_sharded_too(make_job, cluster_address):
    whitened = (*TWO, "model.name=whitened", "model.test_views=2", "recipe.num_epochs=1")
    one, other = (
        train_group(make_job(*whitened, f"execution.strategy={strategy}"), cluster_address)
        for strategy in ("fsdp", "ddp")
    )
    np.testing.assert_allclose(one.losses, other.losses, rtol=1e-3)
