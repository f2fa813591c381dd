"""Ranks that take unequal shares, or exchange fewer bits: the mean over samples, and the same samples per step."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from paceline.tasks.records.execution import Arm
from paceline.tasks.train.launch.coordinator import train_group
from tests.support.jobs import planted

TWO = ("execution.num_devices=2", "recipe.num_epochs=1")
ARM = Arm(num_devices=2, precision="64-true", compile="off", memory_format="contiguous", loading="streaming")


def train_by_hand(directory, arm):
    """The weights of every rank after two epochs of bare steps."""
    directory.mkdir()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.by_hand", directory, str(rank), arm.model_dump_json()],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(arm.num_devices)
    ]
    try:
        for rank in ranks:
            _, said = rank.communicate(timeout=100)
            assert rank.returncode == 0, said
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [torch.load(directory / f"weights-{rank}.pt", weights_only=True) for rank in range(arm.num_devices)]


def largest_difference(first, second):
    return max(float((tensor - second[name]).abs().max()) for name, tensor in first.items())


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The weights that one rank reaches on the same batches."""
    return train_by_hand(tmp_path_factory.mktemp("alone") / "one", ARM.model_copy(update={"num_devices": 1}))[0]


def test_very_unequal_shares_give_the_gradient_of_one_rank(alone, tmp_path):
    first, second = train_by_hand(tmp_path / "uneven", ARM.model_copy(update={"loads": (7.0, 1.0)}))
    assert largest_difference(first, second) == 0
    assert largest_difference(first, alone) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("loads", [pytest.param(None, id="even"), pytest.param((7.0, 1.0), id="uneven")])
def test_micro_batches_on_two_ranks_give_the_gradient_of_one_rank_in_one_pass(alone, tmp_path, loads):
    """Of 64 samples, and 22 of the last batch: even, 4 passes of each rank; uneven, 7 of one and 1 of the other."""
    arm = ARM.model_copy(update={"loads": loads, "micro_batch": 9})
    first, second = train_by_hand(tmp_path / "passes", arm)
    assert largest_difference(first, second) == 0
    assert largest_difference(first, alone) < 1e-12


def test_micro_batches_on_one_rank_take_the_same_steps(alone, tmp_path):
    (weights,) = train_by_hand(tmp_path / "passes", ARM.model_copy(update={"num_devices": 1, "micro_batch": 5}))
    assert largest_difference(weights, alone) < 1e-12


@pytest.mark.slow
def test_compressed_gradients_are_the_same_on_all_ranks_and_nearly_those_of_one(alone, tmp_path):
    arm = ARM.model_copy(update={"gradient_compression": "bf16"})
    first, second = train_by_hand(tmp_path / "compressed", arm)
    assert largest_difference(first, second) == 0
    assert 1e-9 < largest_difference(first, alone) < 1e-2, "rounded, and by no more than that"


@pytest.fixture(scope="module")
def even(make_job, cluster_address):
    """A training with even shares and whole gradients."""
    return train_group(make_job(*TWO), cluster_address)


@pytest.mark.slow
def test_given_loads_train_the_same_batches(even, make_job, cluster_address):
    """Batch norm sees other shares of each batch, so the losses agree only nearly."""
    uneven = train_group(make_job(*TWO, "execution.worker_load=[3,1]"), cluster_address)
    assert (even.worker_load, uneven.worker_load) == (None, (3.0, 1.0))
    assert even.num_steps == uneven.num_steps
    np.testing.assert_allclose(uneven.losses[:3], even.losses[:3], rtol=0.1)


@pytest.mark.slow
def test_a_training_compresses_its_gradients(even, make_job, cluster_address):
    compressed = train_group(make_job(*TWO, "execution.gradient_compression=bf16"), cluster_address)
    assert compressed.losses[0] == even.losses[0], "nothing has been exchanged before the first loss"
    assert compressed.losses[1:] != even.losses[1:]
    np.testing.assert_allclose(compressed.losses[:5], even.losses[:5], rtol=0.02)


@pytest.mark.slow
def test_a_slow_rank_is_measured_and_gets_less_of_the_same_batches(even, make_job, cluster_address):
    job = make_job(*TWO, "execution.worker_load=measured")
    with planted(cluster_address, "rank-1=0.002"):
        result = train_group(job, cluster_address)
    fast, slow = result.worker_load
    assert fast > 2 * slow
    assert result.num_steps == even.num_steps
    np.testing.assert_allclose(result.losses[:3], even.losses[:3], rtol=0.1)
