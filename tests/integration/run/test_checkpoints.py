"""Checkpoints at an interval that follows from their cost: real ranks, whose least interval alone is made smaller."""

import os
import re
import signal
import threading

import pytest

from paceline.tasks.train.checkpoint_interval import rule
from paceline.tasks.train.launch.coordinator import train_group
from tests.integration.faults.test_recovery import newest_step, rank_pid, weights
from tests.integration.run.test_training import check_golden
from tests.support.jobs import planted

LONG_EPOCH = ["execution.num_devices=2", "execution.num_threads=1", "recipe.num_epochs=1", "recipe.batch_size=4"]
NUM_STEPS = 323


@pytest.fixture(scope="module")
def undisturbed(make_job, cluster_address):
    """Two ranks that nothing happens to, in one epoch without a checkpoint before its end."""
    return train_group(make_job(*LONG_EPOCH), cluster_address)


@pytest.mark.slow
def test_a_rank_killed_inside_its_first_epoch_costs_what_came_after_the_checkpoint(
    undisturbed, make_job, cluster_address
):
    job, events = make_job(*LONG_EPOCH), []

    def kill():
        while not (newest_step(job) and any("recorded" in reason for reason in reasons())):
            if over.wait(0.01):
                return
        os.kill(rank_pid(job, 1), signal.SIGKILL)

    def reasons():
        return [facts["choices"]["checkpoint_steps"]["reason"] for facts in events]

    over = threading.Event()
    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    with planted(cluster_address, "rank-0=0", SAVE_SECONDS="0.3"):
        result = train_group(job, cluster_address, events.append)
    over.set()
    thread.join()
    (restart,) = result.restarts
    assert restart.cause == "rank 1 failed: ended by SIGKILL"
    assert 0 < restart.first_step == result.first_step < NUM_STEPS
    assert result.losses == undisturbed.losses
    assert result.num_steps == NUM_STEPS
    for name, tensor in weights(undisturbed).items():
        if "running_" not in name:  # averaged over the ranks at the checkpoint too, and rounded
            assert tensor.equal(weights(result)[name]), name
    found = [int(match[1]) for reason in reasons() if (match := re.search(r"\((\d+) in .* recorded", reason))]
    assert found, "logged while it trains"
    assert found[-1] == found[0] + 1, "the failure is in the record"
    assert len(list(job.checkpoints.glob("step-*.ckpt"))) == 2


def test_the_losses_with_checkpoints_inside_epochs_are_the_golden_ones(make_job, cluster_address):
    job, saved = make_job("recipe.augment=shift"), set()

    def watch():  # only the newest two stay
        while not over.wait(0.01):
            saved.update(int(path.stem.removeprefix("step-")) for path in job.checkpoints.glob("*.ckpt"))

    over = threading.Event()
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    with planted(cluster_address, "rank-0=0", SAVE_SECONDS="0", SAVE_SHARE="100"):
        result = train_group(job, cluster_address)
    over.set()
    thread.join()
    assert any(step % 21 for step in saved), "inside an epoch"
    assert newest_step(job) == 42
    assert isinstance(result.plan.reasons["checkpoint_steps"].value, int)
    check_golden("digits", result.losses)


@pytest.mark.slow
def test_epochs_shorter_than_the_interval_are_not_saved_each(make_job, cluster_address):
    job, events = make_job("recipe.augment=shift"), []
    result = train_group(job, cluster_address, events.append)
    assert [path.name for path in job.checkpoints.glob("*.ckpt")] == ["step-0000000042.ckpt"]
    assert result.checkpoint.endswith("step-0000000042.ckpt")
    assert len(result.epoch_ends) == len(result.validation_scores) == 2
    assert result.plan.reasons["checkpoint_steps"] == rule()
    assert events[-1]["epochs_kept"] == 2
    assert {facts["epochs_kept"] for facts in events[:-1]} <= {0, 2}
    check_golden("digits", result.losses)


@pytest.mark.parametrize(
    ("setting", "saved"), [pytest.param("null", [21, 42], marks=pytest.mark.slow), ("16", [32, 42])]
)
def test_what_is_asked_for_is_done_as_before(make_job, cluster_address, setting, saved):
    job = make_job(f"execution.checkpoint_steps={setting}")
    result = train_group(job, cluster_address)
    assert [int(path.stem.removeprefix("step-")) for path in sorted(job.checkpoints.glob("*.ckpt"))] == saved
    assert "checkpoint_steps" not in result.plan.reasons


@pytest.mark.slow
def test_what_a_checkpoint_takes_decides_on_the_next(make_job, cluster_address):
    job = make_job()
    with planted(cluster_address, "rank-0=0", SAVE_SECONDS="0", SAVE_COST="2"):
        result = train_group(job, cluster_address)
    saved = [int(path.stem.removeprefix("step-")) for path in sorted(job.checkpoints.glob("*.ckpt"))]
    assert saved == [1, 42], "the training is over before the second is due"
    reason = result.plan.reasons["checkpoint_steps"].reason
    assert reason.startswith("a checkpoint takes 2.0 s, a step ")
    assert "but checkpoints may take 2%: " in reason
    assert result.time_budget["checkpoint"] >= 4.0, "two that take two seconds"


@pytest.mark.slow
def test_checkpoints_take_their_share_of_the_time(make_job, cluster_address):
    job = make_job("recipe.num_epochs=20")
    with planted(cluster_address, "rank-0=0.0008", SAVE_SECONDS="0.1", SAVE_COST="0.05"):
        result = train_group(job, cluster_address)
    assert result.time_budget["checkpoint"] >= 4 * 0.05
    last = 0.1  # written whatever it takes
    assert result.time_budget["checkpoint"] - last <= 0.03 * result.seconds
