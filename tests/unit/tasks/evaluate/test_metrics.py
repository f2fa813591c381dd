import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics

from paceline.tasks.errors import RunError
from paceline.tasks.evaluate.metrics import TestSplit, evaluate_predictions, read_test_split, score_difference
from paceline.tasks.records.training import EvaluateResult
from paceline.tasks.scores import class_scores, mean_iou, score_of, score_word
from tests.support.refusals import refused
from tests.support.reports import make_report

NAMES = ("a", "b", "c", "d")


def _split(num_samples=40, num_classes=4, angles=False, seed=0):
    rng = np.random.default_rng(seed)
    return TestSplit(
        labels_N=rng.integers(0, num_classes, num_samples),
        targets_NT=rng.uniform(-3, 3, (num_samples, 1)) if angles else None,
        class_names=NAMES[:num_classes],
    )


def _write(folder, index_N, logits_NK, num_ranks=2, targets_NT=None):
    files = []
    for rank in range(num_ranks):
        mine = slice(rank, None, num_ranks)
        arrays = {"index": index_N[mine], "kept": logits_NK[mine].astype(np.float32)}
        if targets_NT is not None:
            arrays["targets"] = targets_NT[mine].astype(np.float32)
        path = folder / f"predictions{rank}.npz"
        np.savez(path, **arrays)
        files.append(str(path))
    return files


def _logits(labels_N, num_classes=4):
    return np.eye(num_classes)[labels_N] * 5


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_perfect_predictions_in_any_order(tmp_path, num_ranks):
    truth = _split()
    order = np.random.default_rng(1).permutation(40)
    files = _write(tmp_path, order, _logits(truth.labels_N)[order], num_ranks)
    result = evaluate_predictions(files, truth, 123.0)
    assert (result.accuracy, result.num_samples, result.samples_per_second) == (1.0, 40, 123.0)
    assert result.top_k == {"2": 1.0, "3": 1.0}
    assert set(result.per_class_accuracy.values()) == {1.0}
    assert np.trace(np.array(result.confusion)) == 40
    assert result.angle_rmse_degrees is None


def test_known_mistakes(tmp_path):
    truth = TestSplit(labels_N=np.array([0, 0, 1, 1]), targets_NT=None, class_names=NAMES)
    logits_NK = np.array([[9, 1, 0, 0], [1, 9, 0, 0], [0, 9, 1, 0], [1, 0, 0, 9]])
    result = evaluate_predictions(_write(tmp_path, np.arange(4), logits_NK), truth, 1.0)
    assert result.accuracy == 0.5
    assert result.per_class_accuracy == {"a": 0.5, "b": 0.5, "c": None, "d": None}
    assert result.confusion == ((1, 1, 0, 0), (0, 1, 0, 1), (0, 0, 0, 0), (0, 0, 0, 0))
    assert result.top_k["2"] == 0.75


def test_two_classes_have_no_top_k(tmp_path):
    truth = _split(num_classes=2)
    result = evaluate_predictions(_write(tmp_path, np.arange(40), _logits(truth.labels_N, 2)), truth, 1.0)
    assert result.top_k == {}
    assert result.accuracy == 1.0


@given(data=st.data())
def test_counts_agree(tmp_path_factory, data):
    num_samples = data.draw(st.integers(1, 60))
    num_classes = data.draw(st.integers(2, 4))
    truth = _split(num_samples, num_classes, seed=data.draw(st.integers(0, 1000)))
    logits_NK = np.random.default_rng(data.draw(st.integers(0, 1000))).normal(size=(num_samples, num_classes))
    files = _write(tmp_path_factory.mktemp("p"), np.arange(num_samples), logits_NK)
    result = evaluate_predictions(files, truth, 1.0)
    confusion = np.array(result.confusion)
    assert confusion.sum() == num_samples
    assert np.trace(confusion) / num_samples == pytest.approx(result.accuracy)
    tops = [result.accuracy, *result.top_k.values()]
    assert tops == sorted(tops)


@given(seed=st.integers(0, 1000), num_classes=st.integers(3, 7), levels=st.integers(1, 8))
def test_the_scores_are_those_of_scikit_learn(tmp_path_factory, seed, num_classes, levels):
    rng, names = np.random.default_rng(seed), tuple("abcdefg"[:num_classes])
    labels_N, logits_NK = rng.integers(0, num_classes, 50), rng.integers(0, levels, (50, num_classes)) / 2  # with ties
    truth = TestSplit(labels_N, None, names)
    result = evaluate_predictions(_write(tmp_path_factory.mktemp("t"), np.arange(50), logits_NK), truth, 1.0)
    classes, predicted_N = np.arange(num_classes), logits_NK.argmax(axis=1)
    assert result.accuracy == metrics.accuracy_score(labels_N, predicted_N)
    assert np.array_equal(result.confusion, metrics.confusion_matrix(labels_N, predicted_N, labels=classes))
    for k, share in result.top_k.items():
        assert share == metrics.top_k_accuracy_score(labels_N, logits_NK, k=int(k), labels=classes)


def test_angles_go_the_short_way_round(tmp_path):
    truth = TestSplit(np.zeros(2, int), np.array([[np.pi - 0.01], [0.5]]), NAMES)
    predicted_NT = np.array([[-np.pi + 0.01], [0.52]])
    files = _write(tmp_path, np.arange(2), _logits(np.zeros(2, int)), targets_NT=predicted_NT)
    assert evaluate_predictions(files, truth, 1.0).angle_rmse_degrees == pytest.approx(np.degrees(0.02), rel=1e-3)


def test_angles_that_are_not_finite_are_refused(tmp_path):
    truth = _split(angles=True)
    files = _write(tmp_path, np.arange(40), _logits(truth.labels_N), targets_NT=np.full((40, 1), np.nan))
    with refused(None, "recipe.learning_rate", kind=RunError):
        evaluate_predictions(files, truth, 1.0)


@pytest.mark.parametrize(
    ("index", "counts"),
    [
        ([0, 1, 2], "4 1 0 0"),
        ([0, 1, 2, 2], "4 1 1 0"),
        ([0, 1, 2, 3, 3], "4 0 1 0"),
        ([0, 1, 2, 3, 4], "4 0 0 1"),
        ([0, 1, 2, -1], "4 1 0 1"),
    ],
)
def test_each_sample_once(tmp_path, index, counts):
    """The message counts the samples and those that are missing, repeated and unknown."""
    truth = _split(4)
    files = _write(tmp_path, np.array(index), np.zeros((len(index), 4)))
    with pytest.raises(RunError) as error:
        evaluate_predictions(files, truth, 1.0)
    assert re.findall(r"\d+", str(error.value)) == counts.split()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_diverged_model_is_refused(tmp_path, bad):
    truth = _split()
    logits_NK = _logits(truth.labels_N)
    logits_NK[3, 1] = bad
    with refused(None, "1", "40", "recipe.learning_rate", kind=RunError):
        evaluate_predictions(_write(tmp_path, np.arange(40), logits_NK), truth, 1.0)


def test_wrong_files_are_refused(tmp_path):
    truth = _split()
    with pytest.raises(RunError):
        evaluate_predictions([], truth, 1.0)
    with refused(None, tmp_path / "nothing.npz", kind=RunError):
        evaluate_predictions([str(tmp_path / "nothing.npz")], truth, 1.0)
    (tmp_path / "cut.npz").write_bytes(b"PK\x03\x04 and no more")
    with refused(None, tmp_path / "cut.npz", kind=RunError):
        evaluate_predictions([str(tmp_path / "cut.npz")], truth, 1.0)
    np.save(tmp_path / "lone.npy", np.arange(3))
    with refused(None, tmp_path / "lone.npy", kind=RunError):
        evaluate_predictions([str(tmp_path / "lone.npy")], truth, 1.0)
    np.savez(tmp_path / "other.npz", index=np.arange(3))
    with refused(None, tmp_path / "other.npz", "index", "kept", kind=RunError):
        evaluate_predictions([str(tmp_path / "other.npz")], truth, 1.0)
    with refused(None, "3", "4", kind=RunError):
        evaluate_predictions(_write(tmp_path, np.arange(40), np.zeros((40, 3))), truth, 1.0)
    with refused("num_test", "num_test=0", "data.test_fraction", kind=RunError):
        evaluate_predictions([], _split(0), 1.0)


def _shards(root: Path, targets: bool) -> None:
    (root / "test").mkdir()
    for number in (1, 0):
        np.save(root / "test" / f"0000{number}.labels.npy", np.array([number, number + 1], np.int64))
        if targets:
            np.save(root / "test" / f"0000{number}.targets.npy", np.array([0.5, number], np.float32))


@pytest.mark.parametrize("targets", [False, True])
def test_labels_come_in_the_order_of_the_shards(tmp_path, targets):
    _shards(tmp_path, targets)
    split = read_test_split(tmp_path, NAMES)
    assert split.labels_N.tolist() == [0, 1, 1, 2]
    assert (split.targets_NT is not None) == targets
    if targets:
        assert split.targets_NT.shape == (4, 1)


def test_a_set_without_labels_is_refused(tmp_path):
    with refused(None, tmp_path / "test", "*.labels.npy", kind=RunError):
        read_test_split(tmp_path, NAMES)


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
