"""A training that other numbers of ranks take up in mid-epoch: batches and learning rate follow the recipe."""

import os
import signal
import statistics

import pytest

from paceline.tasks.data.loading.sampling import BatchPlan, StepSchedule
from paceline.tasks.train.launch.coordinator import train_group
from paceline.tasks.train.rank.checkpoint import newest_valid_checkpoint
from paceline.tasks.train.rank.checkpoint_io import load
from tests.integration.faults.test_recovery import happening, rank_pid
from tests.support.jobs import changed
from tests.support.log_lines import log_lines

EPOCHS = 20
SETTINGS = (
    "execution.num_devices=2",
    "execution.num_threads=1",
    "execution.checkpoint_steps=4",
    "recipe.schedule=constant",
    "recipe.warmup_epochs=0",
    f"recipe.num_epochs={EPOCHS}",
)


class StoppedError(Exception):
    """The flow goes no further."""


def interrupted(job, address):
    """Train until a rank is killed; steps done, whole epochs, and samples of the next one, as the checkpoint says."""

    def stop(line):
        raise StoppedError(line)

    with (
        happening(job, lambda job: os.kill(rank_pid(job, 0), signal.SIGKILL)),
        pytest.raises(StoppedError, match="ended by SIGKILL"),
        log_lines(stop),
    ):
        train_group(job, address)
    state = load(newest_valid_checkpoint(job.checkpoints))["paceline"]
    return state["step"], state["epoch"], state["first_sample"]


def taken_up(job, num_ranks, **recipe):
    plan = job.plan.model_copy(update={"world_size": num_ranks, "strategy": "single" if num_ranks == 1 else "ddp"})
    job = changed(job, execution={"num_devices": num_ranks}, recipe=recipe)
    return job.model_copy(update={"plan": plan, "resume": True})


def learning_rate(job):
    (optimizer,) = load(newest_valid_checkpoint(job.checkpoints))["optimizer_states"]
    return optimizer["param_groups"][0]["lr"]


def score(result):
    """Median of the last epochs: with a constant learning rate, one is between 0.79 and 0.96 by chance."""
    return statistics.median(result.validation_scores[-5:])


@pytest.mark.slow
def test_weak_scaling_keeps_each_ranks_batch_and_follows_with_the_learning_rate(make_job, cluster_address):
    job = make_job(*SETTINGS, "recipe.batch_scaling=weak")
    step, epoch, position = interrupted(job, cluster_address)
    num, rate = job.prepared.num_train, learning_rate(job)
    assert (epoch, position) == StepSchedule(BatchPlan(num, 128, 2)).position(step)

    # One rank takes the training up, and goes on a few epochs, to the end of one.
    short = taken_up(job, 1, num_epochs=epoch + 3)
    one = train_group(short, cluster_address)
    of_one = StepSchedule(BatchPlan(num, 64), step, epoch, position)
    assert (one.first_step, one.num_steps) == (step, of_one.num_steps(epoch + 3))
    assert len(one.validation_scores) == epoch + 3
    assert learning_rate(job) == rate / 2

    # Two ranks go on from there.
    two = train_group(taken_up(job, 2), cluster_address)
    assert two.first_step == one.num_steps
    assert two.num_steps == one.num_steps + (EPOCHS - epoch - 3) * two.steps_per_epoch
    assert two.losses[: one.num_steps] == one.losses
    assert len(two.validation_scores) == EPOCHS
    assert score(two) > 0.8
    assert learning_rate(job) == rate


@pytest.mark.slow
def test_more_ranks_take_up_an_epoch_that_one_has_begun(make_job, cluster_address):
    job = make_job(*SETTINGS, "recipe.batch_scaling=weak")
    done = interrupted(taken_up(job, 1).model_copy(update={"resume": False}), cluster_address)
    result = train_group(taken_up(job, 2), cluster_address)
    course = StepSchedule(BatchPlan(job.prepared.num_train, 128, 2), *done)
    assert (result.first_step, result.num_steps) == (done[0], course.num_steps(EPOCHS))
    assert len(result.validation_scores) == EPOCHS
    assert score(result) > 0.8


@pytest.mark.slow
def test_strong_scaling_keeps_the_batches(make_job, cluster_address):
    job = make_job(*SETTINGS)
    step, _, _ = interrupted(job, cluster_address)
    rate = learning_rate(job)
    one = train_group(taken_up(job, 1), cluster_address)
    assert (one.first_step, one.num_steps) == (step, EPOCHS * one.steps_per_epoch)
    assert one.steps_per_epoch == BatchPlan(job.prepared.num_train, 64, 2).steps_per_epoch
    assert learning_rate(job) == rate
    assert score(one) > 0.8
