"""Training through Dask for real: fresh rank processes, two gloo ranks, kills, resumes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from mlflow.tracking import MlflowClient

from paceline.tasks.evaluate.metrics import evaluate_predictions, read_test_split
from paceline.tasks.train.launch.coordinator import train_group

GOLDEN = Path(__file__).parents[2] / "golden"
SAME_MATHEMATICS = 1e-3
"""Relative; see tests/golden/README.md."""


def check_golden(name, losses):
    """Compare with the losses in git; write them, and fail once, where there are none."""
    path = GOLDEN / f"{name}.json"
    if not path.exists():
        path.write_text(json.dumps([float(f"{loss:.7g}") for loss in losses], indent=0) + "\n")
        pytest.fail(f"{path} was missing and is written now; commit it if the mathematics was meant to change")
    assert losses == pytest.approx(json.loads(path.read_text()), rel=SAME_MATHEMATICS)


def weights(result):
    return torch.load(result.weights, weights_only=True)


@pytest.fixture(scope="module")
def uninterrupted(make_job, cluster_address):
    """One job trained to its end with checkpoints inside the epochs; several tests look at it."""
    job = make_job("execution.checkpoint_steps=15", "recipe.augment=shift")
    events = []
    return job, train_group(job, cluster_address, events.append), events


def test_training_learns_and_reports(uninterrupted):
    job, result, events = uninterrupted
    assert result.num_steps == len(result.losses) == 42
    assert np.mean(result.losses[-10:]) < 0.9 * np.mean(result.losses[:5])
    assert len(result.validation_scores) == 2
    assert Path(result.checkpoint).name == "step-0000000042.ckpt"
    assert events[-1]["step"] == 42
    curve = MlflowClient(job.tracking_uri).get_metric_history(job.run_id, "train/loss")
    assert [metric.step for metric in curve] == sorted({metric.step for metric in curve})
    assert MlflowClient(job.tracking_uri).get_metric_history(job.run_id, "validation/accuracy")[-1].step == 42


def test_the_losses_are_the_golden_ones(uninterrupted):
    _, result, _ = uninterrupted
    check_golden("digits", result.losses)


def test_the_time_budget_adds_up_to_the_wall_time_seen_from_outside(uninterrupted):
    _, result, _ = uninterrupted
    # The process's end, 0.1 s of a quiet machine, lies outside what it can count itself.
    assert sum(result.time_budget.values()) == pytest.approx(result.wall_seconds, rel=0.02, abs=0.3)
    assert result.clock_difference == pytest.approx(sum(result.time_budget.values()) / result.wall_seconds - 1)
    assert result.energy is None or result.energy.joules == result.energy_joules


def test_the_same_seed_gives_the_same_run_bit_for_bit(uninterrupted, make_job, cluster_address):
    _, first, _ = uninterrupted
    job = make_job("execution.checkpoint_steps=15", "recipe.augment=shift")
    again = train_group(job, cluster_address)
    assert again.losses == first.losses
    assert again.validation_scores == first.validation_scores
    for name, tensor in weights(first).items():
        assert torch.equal(tensor, weights(again)[name]), name


def test_a_resume_inside_an_epoch_continues_bit_for_bit(uninterrupted, cluster_address):
    job, first, _ = uninterrupted
    expected = weights(first)
    checkpoints = job.directory / "checkpoints"
    assert {path.name for path in checkpoints.glob("*.ckpt")} == {"step-0000000030.ckpt", "step-0000000042.ckpt"}
    (checkpoints / "step-0000000042.ckpt").unlink()  # as if killed at step 30, in the middle of epoch 2
    resumed = train_group(job.model_copy(update={"resume": True}), cluster_address)
    assert resumed.first_step == 30
    assert resumed.losses == first.losses
    assert resumed.validation_scores == first.validation_scores
    for name, tensor in expected.items():
        assert torch.equal(tensor, weights(resumed)[name]), name
    curve = MlflowClient(job.tracking_uri).get_metric_history(job.run_id, "train/loss")
    steps = [metric.step for metric in curve]
    assert steps == sorted(set(steps)), "no step is logged twice"


@pytest.mark.slow
def test_a_rank_can_be_replayed_by_hand(uninterrupted, tmp_path):
    job, first, _ = uninterrupted
    spec = json.loads((job.directory / "attempt-0" / "rank-0" / "spec.json").read_text())
    spec |= {"directory": str(tmp_path / "replay"), "checkpoint_directory": str(tmp_path / "checkpoints")}
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(spec))
    environment = {name: value for name, value in os.environ.items() if name != "PACELINE_SPAWNED_AT"}
    subprocess.run(
        [sys.executable, "-m", "paceline.tasks.train.rank.main", str(path)], check=True, env=environment, timeout=120
    )
    assert json.loads((tmp_path / "replay" / "result.json").read_text())["losses"] == list(first.losses)


def test_two_ranks_evaluate_every_sample_once_and_probe_against_one(make_job, cluster_address):
    job = make_job(
        "execution.num_devices=2",
        "speedup.baseline=probe",
        "speedup.max_seconds=2",
        "execution.precision=bf16-mixed",
    )
    result = train_group(job, cluster_address)
    assert (result.world_size, result.num_steps, len(result.predictions)) == (2, 42, 2)
    assert job.prepared.num_test % 2 == 1, "the test set is ragged over two ranks"
    truth = read_test_split(Path(job.prepared.path), job.prepared.class_names)
    found = evaluate_predictions(result.predictions, truth, 1.0)  # refuses missing and repeated samples
    assert found.num_samples == job.prepared.num_test
    assert result.probe is not None
    assert {block.arm for block in result.probe.rounds[0]} == {"baseline", "candidate", "single", "all_cores"}
    assert result.probe.baseline.num_devices == 1
    assert result.probe.candidate.num_devices == 2


def test_two_ranks_of_half_the_batch_take_the_same_steps_as_one(uninterrupted, make_job, cluster_address):
    """Same samples, same order, same mean gradient; batch norm sees half batches, so the losses agree only nearly."""
    _, one, _ = uninterrupted
    job = make_job("recipe.augment=shift", "execution.num_devices=2", "execution.num_threads=1")
    two = train_group(job, cluster_address)
    assert one.num_steps == two.num_steps
    np.testing.assert_allclose(two.losses[:3], one.losses[:3], rtol=0.1)


@pytest.mark.slow
def test_double_precision_and_streaming_train_too(make_job, cluster_address):
    job = make_job("execution.precision=64-true", "recipe.num_epochs=1", "execution.loading=streaming")
    assert np.isfinite(train_group(job, cluster_address).final_loss)


def test_two_heads_train_and_predict_angles(make_job, cluster_address):
    job = make_job("recipe.num_epochs=1", "data.image_size=16", preset="twohead")
    result = train_group(job, cluster_address)
    truth = read_test_split(Path(job.prepared.path), job.prepared.class_names)
    found = evaluate_predictions(result.predictions, truth, 1.0)
    assert 0 < found.angle_rmse_degrees < 30  # always guessing 0 would give 26
    check_golden("twohead", result.losses[:40])
