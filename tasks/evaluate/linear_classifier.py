"""A linear classifier on what a layer of a trained network gives: fitted in seconds, without a GPU.

Reads files that `paceline.tasks.predict` has written. Shapes: N samples, D values of the layer.
"""

import hashlib
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.conf.data import MIN_CLASSES
from paceline.tasks.errors import InputError
from paceline.tasks.records.record import Record

Kind = Literal["logistic", "svm"]
MAX_ITERATIONS = 2_000
MAX_NAMED = 5


@dataclass(frozen=True)
class Features:
    """Features of labelled images."""

    values_ND: npt.NDArray[np.float32]
    labels: tuple[str, ...]  # n
    num_left_out: int  # images that could not be read, or have no class


class Fitted(Record):
    """A classifier, fitted and scored."""

    kind: Kind
    accuracy: float  # share of right classes on the test images
    num_train: int
    num_test: int
    num_features: int
    num_classes: int
    fit_seconds: float
    score_seconds: float
    joules: float | None = None  # of fitting and scoring; None where it cannot be read
    converged: bool  # within the iterations that it has


def read_features(directory: Path) -> Features:
    """Read the files of `paceline features`. Raises InputError: there is nothing to be used."""
    import pyarrow.parquet as pq

    values_ND: npt.NDArray[np.float32] | None = None
    labels, num_samples = list[str](), 0
    for table in _tables(directory, ["features", "true_label"]):
        num_samples += table.num_rows
        rows = table.filter(table["features"].is_valid()).drop_null()
        if not rows.num_rows:
            continue
        flat = rows["features"].combine_chunks().flatten().to_numpy()
        if values_ND is None:  # of all, so that no part is in memory twice
            num_rows = sum(metadata.num_rows for metadata in _of_parts(directory, pq.read_metadata))
            values_ND = np.empty((num_rows, len(flat) // rows.num_rows), np.float32)
        values_ND[len(labels) : len(labels) + rows.num_rows] = flat.reshape(rows.num_rows, -1)
        labels += rows["true_label"].to_pylist()
    if values_ND is None:
        fix = "write those of a folder with a folder for each class"
        raise InputError(f"{directory}: holds features of no image whose class is known; {fix}")
    return Features(values_ND[: len(labels)], tuple(labels), num_left_out=num_samples - len(labels))


def _tables(directory: Path, columns: list[str]) -> Iterator[Any]:
    import pyarrow.parquet as pq

    return _of_parts(directory, lambda part: pq.read_table(part, columns=columns))


def _of_parts(directory: Path, read: Callable[[Path], Any]) -> Iterator[Any]:
    for part in sorted(directory.glob("part-*.parquet")):
        try:
            yield read(part)
        except (OSError, ValueError) as error:
            raise InputError(f"{part}: cannot be read ({error}); write it again with paceline features") from error


def check_classes(train: Path, test: Path) -> None:
    """Raise an InputError unless a classifier fitted on one set can be scored on the other."""
    train_classes, test_classes = _read_classes(train), _read_classes(test)
    if len(train_classes) < MIN_CLASSES:
        fault = f"images of {len(train_classes)} classes, and a classifier needs {MIN_CLASSES} or more"
        raise InputError(f"{train}: {fault}; write features of a folder with a folder for each class")
    if not train_classes & test_classes:
        fault = f"has none of the classes of {train} ({', '.join(sorted(train_classes)[:MAX_NAMED])})"
        raise InputError(f"{test}: {fault}; write features of a folder with a folder for each of them")


def _read_classes(directory: Path) -> set[str]:
    labels = (table["true_label"].unique().to_pylist() for table in _tables(directory, ["true_label"]))
    return set[str]().union(*labels) - {None}


def of_classes(features: Features, names: Collection[str]) -> Features:
    """Without the images of other classes, which count as left out."""
    places = [place for place, label in enumerate(features.labels) if label in names]
    if len(places) == len(features.labels):
        return features
    labels = tuple(features.labels[place] for place in places)
    return Features(features.values_ND[places], labels, features.num_left_out + len(features.labels) - len(places))


def count_common_images(train: Features, test: Features) -> int:
    """Test images of which a layer gave, to the bit, what it gave of one to fit on: most likely the same image."""

    def digests(features: Features) -> Iterator[bytes]:
        return (hashlib.blake2b(row_D.tobytes(), digest_size=16).digest() for row_D in features.values_ND)

    train_digests = set(digests(train))
    return sum(digest in train_digests for digest in digests(test))


class Fit(NamedTuple):
    """A classifier that has been fitted: a scikit-learn pipeline, with `predict` and `classes_`."""

    pipeline: Any
    seconds: float
    converged: bool  # within the iterations that it has


def fit(kind: Kind, values_ND: npt.NDArray[np.float32], labels_N: npt.ArrayLike, seed: int) -> Fit:
    """Fit a classifier to values brought to mean 0, variance 1; the seed orders the samples of a vector machine."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if kind == "svm":
        from sklearn.svm import LinearSVC

        classifier = LinearSVC(C=0.01, max_iter=MAX_ITERATIONS, random_state=seed)  # of values that are all of size 1
    else:
        from sklearn.linear_model import LogisticRegression

        classifier = LogisticRegression(C=0.01, max_iter=MAX_ITERATIONS)
    pipeline = make_pipeline(StandardScaler(), classifier)
    started = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        pipeline.fit(values_ND, labels_N)
    seconds = time.perf_counter() - started
    return Fit(pipeline, seconds, not any(issubclass(warning.category, ConvergenceWarning) for warning in caught))


def fit_and_score(kind: Kind, train: Features, test: Features, seed: int) -> Fitted:
    """Fit a classifier on some images, and score it on others."""
    fitted = fit(kind, train.values_ND, train.labels, seed)
    started = time.perf_counter()
    right_N = fitted.pipeline.predict(test.values_ND) == np.array(test.labels)
    return Fitted(
        kind=kind,
        accuracy=float(right_N.mean()),
        num_train=len(train.labels),
        num_test=len(test.labels),
        num_features=train.values_ND.shape[1],
        num_classes=len(set(train.labels)),
        fit_seconds=fitted.seconds,
        score_seconds=time.perf_counter() - started,
        converged=fitted.converged,
    )
