"""Passes that do not fit into a device's memory: the group goes on with smaller ones, on the same batches."""

import os
import signal

import pytest

from paceline.tasks.errors import RankError
from paceline.tasks.speedup.verdict import speedup_result
from paceline.tasks.train.launch.coordinator import train_group
from paceline.tasks.train.launch.out_of_memory import restore_micro_batch
from tests.integration.faults.test_recovery import LONG, check_nothing_is_lost, happening, rank_pid, weights
from tests.support.jobs import changed, planted

TWO = ("execution.num_devices=2", "execution.num_threads=1")


@pytest.mark.slow
def test_a_rank_without_memory_makes_all_take_smaller_passes_of_the_same_batches(make_job, cluster_address, caplog):
    """One rank has memory for 16 of its 32 samples, the other for all: the losses are those of asking for 16."""
    job = make_job(*TWO)
    with planted(cluster_address, "rank-1=0", MEMORY="rank-1=16"):
        result = train_group(job, cluster_address)
    (restart,) = result.restarts
    assert "rank 1 failed: MemoryLimitError: a pass over 32 samples needs more memory" in restart.cause
    assert result.plan.micro_batch == 16
    assert result.plan.reasons["micro_batch"].reason.startswith("32 samples at once did not fit into the memory of ")
    resumed = restore_micro_batch(job.directory, job.plan, job.config)
    assert (resumed.micro_batch, resumed.reasons["micro_batch"]) == (16, result.plan.reasons["micro_batch"])
    otherwise = changed(job, execution={"micro_batch": 8})
    assert restore_micro_batch(job.directory, otherwise.plan, otherwise.config) == otherwise.plan, (
        "what is asked for goes first"
    )
    assert any("micro-batches of 16, on the same batches" in line for line in caplog.messages)
    asked = train_group(make_job(*TWO, "execution.micro_batch=16"), cluster_address)
    assert asked.restarts == ()
    assert asked.plan.micro_batch == 16
    assert result.losses == asked.losses
    assert (result.num_steps, result.samples_per_epoch) == (asked.num_steps, asked.samples_per_epoch)
    for name, tensor in weights(asked).items():
        assert tensor.equal(weights(result)[name]), name


@pytest.mark.slow
def test_a_group_of_smaller_passes_goes_on_inside_an_epoch(make_job, cluster_address):
    """Each batch of 32 samples of a rank is taken in passes of 12, 12 and 8; a rank is killed in mid-epoch."""
    passes = [*LONG, "execution.micro_batch=12"]
    whole = train_group(make_job(*passes), cluster_address)
    job = make_job(*passes)
    with happening(job, lambda job: os.kill(rank_pid(job, 1), signal.SIGKILL)):
        result = train_group(job, cluster_address)
    restart = check_nothing_is_lost(job, result, whole)
    assert restart.first_step % 21, "inside an epoch"


def test_what_was_asked_for_and_does_not_fit_is_an_error_with_its_remedy(make_job, cluster_address):
    job = make_job("execution.micro_batch=32")
    with (
        planted(cluster_address, "rank-0=0", MEMORY="16"),
        pytest.raises(RankError, match=r"\b32\b.*\bexecution\.micro_batch=auto\b.*\b16\b"),
    ):
        train_group(job, cluster_address)


@pytest.mark.slow
def test_an_update_without_memory_is_taken_again_from_the_newest_checkpoint(make_job, cluster_address):
    """It was half done: the weights in memory are neither the old ones nor the new."""
    job = make_job("execution.checkpoint_steps=10")
    with planted(cluster_address, "rank-0=0", UPDATE_MEMORY="32=30"):
        result = train_group(job, cluster_address)
    (restart,) = result.restarts
    assert "MemoryLimitError: the update after a pass over 64 samples needs more memory" in restart.cause
    assert (restart.first_step, result.first_step, result.plan.micro_batch) == (21, 21, 32)
    alone = train_group(make_job(), cluster_address)
    assert result.losses[:21] == alone.losses[:21]
    assert result.losses[21:] == pytest.approx(alone.losses[21:], rel=0.2), "batch norms of half the samples"


@pytest.mark.slow
def test_a_set_that_does_not_fit_into_memory_is_streamed(make_job, cluster_address):
    job = make_job()
    assert job.plan.loading == "resident"
    with planted(cluster_address, "rank-0=0", SET_MEMORY="none"):
        result = train_group(job, cluster_address)
    assert "MeasureMemoryError: resident loading: CUDA out of memory" in result.restarts[0].cause
    assert result.plan.loading == "streaming"
    assert result.plan.reasons["loading"].reason.startswith("the set did not fit into the memory of ")
    asked = make_job("execution.loading=resident")
    with (
        planted(cluster_address, "rank-0=0", SET_MEMORY="none"),
        pytest.raises(RankError, match=r"\bexecution\.loading=streaming\b"),
    ):
        train_group(asked, cluster_address)


PROBED = ("speedup.baseline=probe", "speedup.max_seconds=2", "speedup.diagnose=true")


@pytest.mark.slow
def test_an_arm_without_memory_is_left_out_of_the_probe_with_its_reason(make_job, cluster_address):
    job = make_job(*PROBED)
    with planted(cluster_address, "rank-0=0", ARM_COPY="synthetic_input"):
        result = train_group(job, cluster_address)
    assert "MeasureMemoryError: probe: 1 device, 32-true" in result.restarts[0].cause
    assert {"half_batch", "no_update"} <= result.probe.others.keys()
    assert "synthetic_input" not in result.probe.others
    assert result.probe.left_out.keys() == {"synthetic_input"}
    assert "needs more memory than" in result.probe.left_out["synthetic_input"]
    assert speedup_result(result.probe, result).ratio is not None


@pytest.mark.slow
def test_a_baseline_without_memory_leaves_no_ratio_and_a_reason(make_job, cluster_address):
    job = make_job(*PROBED)
    with planted(cluster_address, "rank-0=0", ARM_COPY="foreground"):
        result = train_group(job, cluster_address)
    assert (result.probe, len(result.restarts), result.plan.micro_batch) == (None, 1, None)
    verdict = speedup_result(result.probe, result)
    assert verdict.ratio is None
    assert verdict.verdict.startswith(
        "not measured: 1 device, 32-true, contiguous, eager, foreground needs more memory"
    )


@pytest.mark.slow
def test_a_yardstick_without_memory_changes_nothing_of_a_training_that_has_it(make_job, cluster_address, caplog):
    job = make_job(*TWO, "speedup.baseline=probe", "speedup.max_seconds=2")
    with planted(cluster_address, "rank-0=0", ARM_MEMORY="8"):
        result = train_group(job, cluster_address)
    assert result.probe is None
    assert (result.plan.micro_batch, (job.directory / "micro_batch.json").exists()) == (None, False)
    assert any("leaving it out of the probe" in line for line in caplog.messages)
    assert "failed: MeasureMemoryError: probe: 1 device, 32-true" in result.restarts[0].cause
    alone = train_group(make_job(*TWO), cluster_address)
    assert result.losses == alone.losses
