"""Linear classifiers on features: known answers."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paceline.tasks.evaluate.linear_classifier import (
    Features,
    check_classes,
    count_common_images,
    fit_and_score,
    of_classes,
    read_features,
)
from tests.support.refusals import refused


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
    assert (count_common_images(train, test), count_common_images(train, both)) == (0, 7)


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


def test_what_is_learned_must_have_classes_and_share_one_with_what_is_scored(tmp_path):
    train, test, other = (tmp_path / name for name in ("train", "test", "other"))
    for place, rows in (
        (train, [([1, 2], "a"), ([1, 3], "b"), ([1, 4], None)]),
        (test, [([1, 2], "b")]),
        (other, [([1, 2], "x"), ([1, 2], "y")]),
    ):
        place.mkdir()
        write(place, 0, rows)
    check_classes(train, test)
    with refused(None, test, 1, 2):
        check_classes(test, train)
    with refused(None, other, train, "(a"):
        check_classes(train, other)
    write(other, 0, [([1, 2], None)])
    with refused(None, other):
        read_features(other)
    (other / "part-00001.parquet").write_bytes(b"nothing")
    with refused(None, other / "part-00001.parquet"):
        check_classes(train, other)


def test_images_of_other_classes_are_left_out_of_the_score():
    train, test = clouds(1), clouds(2)
    strange = Features(np.concatenate([test.values_ND, test.values_ND[:5]]), test.labels + ("x",) * 5, 2)
    found = of_classes(strange, set(train.labels))
    assert (found.labels, found.num_left_out) == (test.labels, 7)
    assert fit_and_score("logistic", train, found, seed=1).accuracy == 1.0
    assert of_classes(test, set(train.labels)) is test
