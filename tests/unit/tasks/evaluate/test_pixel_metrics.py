"""What two sets of statistics say of the difference of their scores, against known means and against resampling."""

import numpy as np
import pytest

from paceline.tasks.evaluate.pixel_metrics import score_difference
from paceline.tasks.records.training import EvaluateResult
from paceline.tasks.scores import class_scores, mean_iou, score_of, score_word
from tests.support.reports import make_report

NUM, NUM_CLASSES = 300, 3


@pytest.fixture
def prepared():
    return make_report(None).prepared.model_copy(update={"num_test": NUM})


@pytest.fixture
def saved(tmp_path):
    """Writes a rank's statistics; its files."""

    def save(name, kept):
        np.savez(tmp_path / f"{name}.npz", index=np.arange(NUM), kept=kept)
        return (str(tmp_path / f"{name}.npz"),)

    return save


def test_of_means_it_is_the_paired_difference_with_its_standard_error(saved, prepared):
    rng = np.random.default_rng(0)
    first = rng.uniform(0, 1, (NUM, 4))
    second = first + rng.normal(0.01, 0.05, (NUM, 4))
    value, error = score_difference(saved("a", first), saved("b", second), prepared, "ssim")
    difference = (second - first)[:, 1]
    assert value == pytest.approx(difference.mean())
    assert error == pytest.approx(difference.std(ddof=1) / np.sqrt(NUM))
    assert score_difference(saved("a", first), saved("b", first), prepared, "ssim") == (0, 0)


def pixels(rng, right):
    """Statistics of NUM pictures of 100 pixels, of which a share is rightly told."""
    there = rng.multinomial(100, [0.7, 0.2, 0.1], NUM)
    both = rng.binomial(there, right)
    wrong = (there - both).sum(1)
    told = both + np.stack([rng.multinomial(number, [0.4, 0.3, 0.3]) for number in wrong])
    return np.concatenate([np.zeros((NUM, 1)), both, told, there], axis=1)


def test_of_mean_iou_it_is_what_resampling_the_pictures_gives(saved, prepared):
    rng = np.random.default_rng(1)
    first, second = pixels(rng, 0.85), pixels(rng, 0.9)
    value, error = score_difference(saved("a", first), saved("b", second), prepared, "mean_iou")
    assert value == pytest.approx(mean_iou(second.sum(0)[1:]) - mean_iou(first.sum(0)[1:]))
    drawn = []
    for _ in range(2000):
        chosen = rng.integers(0, NUM, NUM)
        drawn.append(mean_iou(second[chosen].sum(0)[1:]) - mean_iou(first[chosen].sum(0)[1:]))
    assert error == pytest.approx(np.std(drawn), rel=0.1)


def test_a_score_is_named():
    assert score_of({"test/accuracy": 0.98, "test/mean_iou": 0.9}) == ("mean_iou", 0.9), "of pixels, and not the score"
    assert score_of({"test/accuracy": 0.98}) == ("accuracy", 0.98)
    assert score_of({"train/loss": 1.0}) is None
    assert score_word(["ssim", None, "ssim"]) == "SSIM"
    assert score_word(["ssim", "accuracy"]) == "score"
    assert score_word([None]) == "accuracy"
    result = EvaluateResult(num_samples=1, samples_per_second=1.0, seconds=1.0, per_class_accuracy={"a": 1.0})
    assert class_scores(result) == ("accuracy", {"a": 1.0})
    assert class_scores(result.model_copy(update={"per_class_iou": {"a": 0.5}})) == ("IoU", {"a": 0.5})
