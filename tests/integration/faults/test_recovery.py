"""Trainings that lose a rank, a worker, a checkpoint: begun again, and nothing of the result is lost."""

import os
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from mlflow.tracking import MlflowClient

from paceline.tasks.errors import PacelineError, RankError
from paceline.tasks.train.launch.coordinator import train_group
from paceline.tasks.train.launch.rank_process import running_ranks
from paceline.tasks.train.rank.checkpoint import newest_valid_checkpoint, step_of
from tests.support.log_lines import log_lines
from tests.support.small_disk import fill, small_disk

EPOCHS = 10
LONG = ["execution.num_devices=2", "execution.num_threads=1", f"recipe.num_epochs={EPOCHS}"]
LONG += ["execution.checkpoint_steps=10"]
FAR = 60
"""Steps after which something is lost; the whole has 210."""


def told_steps(num_epochs):
    """At which steps a loss is told, of epochs of 21 steps."""
    ends = range(21, 21 * num_epochs + 1, 21)
    return sorted({*ends, *range(5, 21 * num_epochs, 5)})


def weights(result):
    return torch.load(result.weights, weights_only=True)


@pytest.fixture(scope="module")
def whole(make_job, cluster_address):
    """Two ranks that nothing happens to."""
    return train_group(make_job(*LONG), cluster_address)


@contextmanager
def happening(job, disturb, attempt=0):
    """Disturb the training of a job once it has come far enough."""

    def wait_and_disturb():
        progress = job.directory / f"attempt-{attempt}" / "rank-0" / "progress.json"
        while not stop.is_set():
            if progress.exists() and newest_step(job) >= FAR:
                disturb(job)
                return
            time.sleep(0.02)

    stop = threading.Event()
    thread = threading.Thread(target=wait_and_disturb, daemon=True)
    thread.start()
    yield
    stop.set()
    thread.join()


def newest_step(job):
    found = sorted(job.checkpoints.glob("step-*.ckpt"))
    return int(found[-1].stem.removeprefix("step-")) if found else 0


def rank_pid(job, rank):
    ranks = [pid for pid in running_ranks(job.run_id) if f"/rank-{rank}/" in Path(f"/proc/{pid}/cmdline").read_text()]
    return ranks[0]


def check_nothing_is_lost(job, result, whole):
    assert result.losses == whole.losses
    assert result.validation_scores == whole.validation_scores
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(result)[name]), name
    (restart,) = result.restarts
    assert restart.num_ranks == 2
    assert restart.first_step >= FAR - 20
    assert restart.lost_steps >= 0
    assert restart.first_step == result.first_step
    assert result.time_budget["recovery"] > restart.seconds
    assert sum(result.time_budget.values()) == pytest.approx(result.wall_seconds, rel=0.02, abs=0.3)
    curve = MlflowClient(job.tracking_uri).get_metric_history(job.run_id, "train/loss")
    assert [metric.step for metric in curve] == told_steps(EPOCHS), "no step is missing or told twice"
    assert running_ranks(job.run_id) == []
    return restart


def test_a_killed_rank_costs_a_restart_and_no_result(whole, make_job, cluster_address, caplog):
    job = make_job(*LONG)
    with happening(job, lambda job: os.kill(rank_pid(job, 1), signal.SIGKILL)):
        result = train_group(job, cluster_address)
    restart = check_nothing_is_lost(job, result, whole)
    assert restart.cause == "rank 1 failed: ended by SIGKILL"
    assert restart.rank == 1
    assert caplog.messages[0] == "rank 1 failed: ended by SIGKILL; restarting the group"


@pytest.mark.slow
def test_a_stopped_rank_is_found_and_a_truncated_checkpoint_passed_over(whole, make_job, cluster_address):
    def stop_and_truncate(job):
        os.kill(rank_pid(job, 1), signal.SIGSTOP)
        time.sleep(1)  # rank 0 comes to no further checkpoint without it
        kept.extend(sorted(job.checkpoints.glob("step-*.ckpt")))
        kept[-1].write_bytes(kept[-1].read_bytes()[:-100])

    job, kept = make_job(*LONG), []
    with happening(job, stop_and_truncate):
        result = train_group(job, cluster_address)
    restart = check_nothing_is_lost(job, result, whole)
    assert restart.cause.startswith("rank 1 on 127.0.0.1 has given no sign of life for 1")
    assert restart.cause.endswith("its process is stopped")
    assert restart.first_step == step_of(kept[-2])
    assert restart.lost_steps >= step_of(kept[-1]) - step_of(kept[-2])
    assert len(list(job.checkpoints.glob("*.damaged"))) == 1


def test_a_rank_that_always_fails_is_given_up(make_job, cluster_address):
    job = make_job("execution.num_devices=2", "recipe.learning_rate=1e30")
    with pytest.raises(RankError, match=r"rank \d\b.*: RunError: train/loss\b.*\bnan\b") as error:
        train_group(job, cluster_address)
    assert "close_window" in error.value.rank_traceback
    assert len(list(job.directory.glob("attempt-*"))) == 1, "what it said on purpose it would say again"
    assert running_ranks(job.run_id) == []


@pytest.mark.slow
def test_a_full_disk_costs_a_restart_once_there_is_room(whole, make_job, cluster_address):
    job = make_job(*LONG)
    with small_disk(job.directory, megabytes=8) as filler:

        def make_room(line):
            if "No space left on device" in line:
                filler.unlink(missing_ok=True)

        with happening(job, lambda job: fill(filler)), log_lines(make_room):
            result = train_group(job, cluster_address)
        restart = check_nothing_is_lost(job, result, whole)
    assert "OSError: [Errno 28] No space left on device: '" in restart.cause
    assert f"{job.checkpoints}/step-" in restart.cause


@pytest.mark.slow
def test_a_disk_that_stays_full_ends_the_run_and_leaves_a_whole_checkpoint(make_job, cluster_address):
    job = make_job(*LONG)
    with small_disk(job.directory, megabytes=8) as filler:
        with (
            happening(job, lambda job: fill(filler)),
            pytest.raises(PacelineError, match="No space left on device: '"),
        ):
            train_group(job, cluster_address)
        filler.unlink()
        assert newest_valid_checkpoint(job.checkpoints) is not None
        assert step_of(newest_valid_checkpoint(job.checkpoints)) >= FAR - 20
        assert list(job.checkpoints.glob("*.tmp")) == []
    assert running_ranks(job.run_id) == []
