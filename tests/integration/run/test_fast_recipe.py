"""The parts of the fast recipes together, on two real gloo ranks: they learn, resume exactly and predict."""

from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.tasks.data.loading.split_reader import open_split
from paceline.tasks.evaluate.metrics import evaluate_predictions, read_test_split
from paceline.tasks.files import sha256_of
from paceline.tasks.model_bundle import FACTS, WEIGHTS, digest_of
from paceline.tasks.predict.job import Settings
from paceline.tasks.predict.predictor import Predictor
from paceline.tasks.records.data import ModelFacts
from paceline.tasks.train.launch.coordinator import train_group

FAST = (
    "model.name=whitened",
    "model.width=16",
    "model.test_views=6",
    "data.validation_fraction=0",
    "recipe.optimizer=muon",
    "recipe.learning_rate=0.1",
    "recipe.momentum=0.6",
    "recipe.weight_decay=0.0167",
    "recipe.label_smoothing=0.2",
    "recipe.num_epochs=3",
    "recipe.warmup_epochs=0",
    "recipe.augment=alternating_flip_shift",
    "recipe.shift_pixels=1",
    "execution.num_devices=2",
    "execution.checkpoint_steps=30",
)


@pytest.fixture(scope="module")
def trained(make_job, cluster_address):
    job = make_job(*FAST)
    return job, train_group(job, cluster_address)


def test_it_learns_in_a_few_epochs(trained):
    job, result = trained
    assert result.validation_scores == (), "all samples are trained on"
    truth = read_test_split(Path(job.prepared.path), job.prepared.class_names)
    assert evaluate_predictions(result.predictions, truth, 1.0).accuracy > 0.93


@pytest.mark.slow
def test_a_resume_goes_on_bit_for_bit(trained, cluster_address):
    job, first = trained
    expected = torch.load(first.weights, weights_only=True)
    (job.directory / "checkpoints" / f"step-{first.num_steps:010d}.ckpt").unlink()
    resumed = train_group(job.model_copy(update={"resume": True}), cluster_address)
    assert resumed.first_step == 60
    assert resumed.losses == first.losses
    for name, tensor in torch.load(resumed.weights, weights_only=True).items():
        if "running_" not in name:  # a checkpoint inside an epoch holds rank 0's statistics
            assert torch.equal(tensor, expected[name]), name


def test_the_model_predicts_folded_and_in_bf16_what_it_does_as_it_was_trained(trained, tmp_path):
    job, result = trained
    weights = Path(result.weights)
    kept = {"image_shape", "class_names", "target_names", "mean", "std", "fingerprint"}
    facts = ModelFacts(
        model=job.config.model, weights_sha256=sha256_of(weights), **job.prepared.model_dump(include=kept)
    )
    (tmp_path / FACTS).write_text(facts.model_dump_json())
    (tmp_path / WEIGHTS).write_bytes(weights.read_bytes())
    settings = Settings(
        model_directory=str(tmp_path),
        model_digest=digest_of(facts),
        precision="bf16-mixed",
        gpu=False,
        num_threads=1,
        batch_size=50,
    )
    split = open_split(job.prepared, "test")
    pixels_NHWC = split.gather(np.arange(split.num_samples))
    plain, *_ = Predictor(settings, plain=True)(pixels_NHWC)
    rows = [np.load(path) for path in result.predictions]
    ours = np.concatenate([row["kept"] for row in rows])
    np.testing.assert_allclose(plain, torch.softmax(torch.from_numpy(ours), 1).numpy(), atol=1e-4)
    executed, *_ = Predictor(settings)(pixels_NHWC)
    assert (executed.argmax(1) == plain.argmax(1)).mean() > 0.98
