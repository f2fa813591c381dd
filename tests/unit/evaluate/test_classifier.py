"""Linear classifiers on features: known answers."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.errors import InputError
from tasks.evaluate.classifier import Features, fit_and_score, num_shared, read_features


def clouds(seed, num=60, distance=8.0):
    """Three clouds of points, and one value that says nothing, of another size."""
    noise = np.random.default_rng(seed)
    centres = distance * np.eye(3)
    labels = np.arange(num) % 3
    values_ND = np.concatenate([centres[labels] + noise.normal(size=(num, 3)), 1e4 * noise.normal(size=(num, 1))], 1)
    return Features(
        values_ND=values_ND.astype(np.float32), labels=tuple("abc"[label] for label in labels), num_left_out=0
    )


@pytest.mark.parametrize("kind", ["logistic", "svm"])
def test_classes_that_lie_apart_are_told_and_others_not(kind):
    found = fit_and_score(kind, clouds(1), clouds(2), seed=1)
    assert (found.accuracy, found.converged) == (1.0, True)
    assert (found.num_train, found.num_test, found.num_features, found.num_classes) == (60, 60, 4, 3)
    alike = fit_and_score(kind, clouds(1, distance=0.0), clouds(2, num=600, distance=0.0), seed=1)
    assert alike.accuracy == pytest.approx(1 / 3, abs=0.08)


def test_images_that_are_on_both_sides_are_counted():
    train, test = clouds(1), clouds(2)
    both = Features(np.concatenate([test.values_ND, train.values_ND[:7]]), test.labels + train.labels[:7], 0)
    assert (num_shared(train, test), num_shared(train, both)) == (0, 7)


def write(directory, number, rows):
    columns = {"features": pa.array([row[0] for row in rows], pa.list_(pa.float32()))}
    columns["true_label"] = pa.array([row[1] for row in rows], pa.string())
    pq.write_table(pa.table(columns), directory / f"part-{number:05d}.parquet")


def test_what_has_no_features_or_no_class_is_left_out(tmp_path):
    write(tmp_path, 0, [([1, 2], "a"), (None, "a"), ([3, 4], None)])
    write(tmp_path, 1, [(None, "b")])
    write(tmp_path, 2, [([5, 6], "b")])
    found = read_features(tmp_path)
    assert found.values_ND.tolist() == [[1, 2], [5, 6]]
    assert (found.labels, found.num_left_out) == (("a", "b"), 3)


def test_one_class_is_too_few(tmp_path):
    write(tmp_path, 0, [([1, 2], "a"), ([1, 3], "a")])
    with pytest.raises(InputError, match="images of 1 classes, and a classifier needs 2 or more"):
        read_features(tmp_path)
