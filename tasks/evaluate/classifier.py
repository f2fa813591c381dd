"""A linear classifier on what a layer of a trained network gives: fitted in seconds, without a GPU.

Reads files that `tasks.predict` has written. Shapes: N samples, D values of the layer.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from conf.data import MIN_CLASSES
from tasks.errors import InputError
from tasks.records import Record

Kind = Literal["logistic", "svm"]
MAX_ITERATIONS = 2_000


@dataclass(frozen=True)
class Features:
    """What a layer gave for images whose class is known."""

    values_ND: npt.NDArray[np.float32]
    labels: tuple[str, ...]
    """N."""
    num_left_out: int
    """Images that could not be read, or have no class."""


class Fitted(Record):
    """A classifier, fitted and scored."""

    kind: Kind
    accuracy: float
    """Share of right classes on the test images."""
    num_train: int
    num_test: int
    num_features: int
    num_classes: int
    fit_seconds: float
    score_seconds: float
    joules: float | None = None
    """Of fitting and scoring; None where it cannot be read."""
    converged: bool
    """Within the iterations that it has."""


def read_features(directory: Path) -> Features:
    """What `paceline features` has written.

    Raises:
        InputError: there is nothing to be used.
    """
    import pyarrow.parquet as pq

    parts = sorted(directory.glob("part-*.parquet"))
    try:
        tables = [pq.read_table(part, columns=["features", "true_label"]) for part in parts]
    except (OSError, ValueError) as error:
        raise InputError(f"{directory}: cannot be read ({error}); write it again with paceline features") from error
    rows: list[npt.NDArray[np.float32]] = []
    labels: list[str] = []
    num_samples = 0
    for table in tables:
        num_samples += table.num_rows
        known = table.filter(table["features"].is_valid()).drop_null()
        if known.num_rows:
            flat = known["features"].combine_chunks().flatten().to_numpy()
            rows.append(flat.reshape(known.num_rows, -1))
        labels += known["true_label"].to_pylist()
    if len(set(labels)) < MIN_CLASSES:
        raise InputError(
            f"{directory}: images of {len(set(labels))} classes, and a classifier needs {MIN_CLASSES} or more; "
            "write features of a folder with a folder for each class"
        )
    return Features(values_ND=np.concatenate(rows), labels=tuple(labels), num_left_out=num_samples - len(labels))


def num_shared(train: Features, test: Features) -> int:
    """Test images of which a layer gave, to the bit, what it gave of one to fit on: most likely the same image."""
    seen = {row.tobytes() for row in train.values_ND}
    return sum(row.tobytes() in seen for row in test.values_ND)


class Fit(NamedTuple):
    """A classifier that has been fitted: a scikit-learn pipeline, with `predict` and `classes_`."""

    pipeline: Any
    seconds: float
    converged: bool
    """Within the iterations that it has."""


def fit(kind: Kind, values_ND: npt.NDArray[np.float32], labels_N: npt.ArrayLike, seed: int) -> Fit:
    """Fit a classifier.

    Values are brought to mean 0 and variance 1 over the samples that it is fitted on.

    Args:
        kind: `logistic` regression, or a linear support vector machine (`svm`).
        values_ND: features.
        labels_N: names or numbers of classes.
        seed: of the order in which the machine goes through the samples.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    pipeline = make_pipeline(StandardScaler(), _classifier(kind, seed))
    started = time.perf_counter()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", ConvergenceWarning)
        pipeline.fit(values_ND, labels_N)
    seconds = time.perf_counter() - started
    return Fit(pipeline, seconds, not any(issubclass(warning.category, ConvergenceWarning) for warning in told))


def fit_and_score(kind: Kind, train: Features, test: Features, seed: int) -> Fitted:
    """Fit a classifier on some images, and score it on others.

    Args:
        kind: as in `fit`.
        train: to fit it on.
        test: to score it on.
        seed: as in `fit`.
    """
    found = fit(kind, train.values_ND, train.labels, seed)
    started = time.perf_counter()
    right_N = found.pipeline.predict(test.values_ND) == np.array(test.labels)
    return Fitted(
        kind=kind,
        accuracy=float(right_N.mean()),
        num_train=len(train.labels),
        num_test=len(test.labels),
        num_features=train.values_ND.shape[1],
        num_classes=len(set(train.labels)),
        fit_seconds=found.seconds,
        score_seconds=time.perf_counter() - started,
        converged=found.converged,
    )


def _classifier(kind: Kind, seed: int) -> Any:
    if kind == "svm":
        from sklearn.svm import LinearSVC

        return LinearSVC(C=0.01, max_iter=MAX_ITERATIONS, random_state=seed)  # of values that are all of size 1
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(C=0.01, max_iter=MAX_ITERATIONS)
