"""Passes that do not fit into a device's memory: the group goes on with smaller ones, on the same batches."""

import pytest

from tasks.errors import RankError
from tasks.train.coordinate import train_group
from tests.integration.test_recovery import weights
from tests.jobs import planted

TWO = ("execution.num_devices=2", "execution.num_threads=1")


def test_a_rank_without_memory_makes_all_take_smaller_passes_of_the_same_batches(make_job, cluster_address):
    """One rank has memory for 16 of its 32 samples, the other for all: the losses are those of asking for 16."""
    told, job = [], make_job(*TWO)
    with planted(cluster_address, "rank-1=0", MEMORY="rank-1=16"):
        result = train_group(job, cluster_address, tell=told.append)
    (restart,) = result.restarts
    assert "rank 1 failed: MemoryLimitError: a pass over 32 samples needs more memory" in restart.cause
    assert result.plan.micro_batch == 16
    assert result.plan.reasons["micro_batch"].reason.startswith("32 samples at once did not fit into the memory of ")
    assert any("going on with passes of 16, on the same batches" in said for said in told)
    asked = train_group(make_job(*TWO, "execution.micro_batch=16"), cluster_address)
    assert asked.restarts == ()
    assert asked.plan.micro_batch == 16
    assert result.losses == asked.losses
    assert (result.num_steps, result.samples_per_epoch) == (asked.num_steps, asked.samples_per_epoch)
    for name, tensor in weights(asked).items():
        assert tensor.equal(weights(result)[name]), name


def test_what_was_asked_for_and_does_not_fit_is_an_error_with_its_remedy(make_job, cluster_address):
    job = make_job("execution.micro_batch=32")
    with (
        planted(cluster_address, "rank-0=0", MEMORY="16"),
        pytest.raises(RankError, match=r"pass over 32 samples .* use execution\.micro_batch=auto, or 16"),
    ):
        train_group(job, cluster_address)
