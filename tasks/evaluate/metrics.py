"""The quality on the test split from the ranks' prediction files, where each sample must occur exactly once.

Of models of pixels these hold statistics in the order of `paceline.tasks.model.objectives`.
Shapes: N samples, M sets of samples, K classes, T targets, S statistics.
"""

import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.tasks.errors import RunError
from paceline.tasks.records.data import PreparedSet
from paceline.tasks.records.training import EvaluateResult, ScoreName, TrainResult
from paceline.tasks.scores import ious, mean_iou

TOP_K = (2, 3, 5)

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TestSplit:
    """The truth. `targets_NT` in radians, None where the set has no regression targets."""

    __test__ = False  # pytest would collect it by its name

    labels_N: Ints
    targets_NT: Floats | None
    class_names: tuple[str, ...]


@dataclass(frozen=True)
class Predictions:
    """Predictions of all ranks, in the order of the split."""

    outputs: Floats  # logits (N, K), or statistics (N, S)
    targets_NT: Floats | None


def read_test_split(path: Path, class_names: Sequence[str]) -> TestSplit:
    """Read the labels, and the targets where there are any, of a prepared set's `test` shards; RunError without any."""
    labels, targets = (
        [np.load(shard, allow_pickle=False) for shard in sorted((path / "test").glob(f"*.{kind}.npy"))]
        for kind in ("labels", "targets")
    )
    if not labels:
        raise RunError(f"{path / 'test'} holds no *.labels.npy; a prepared set has a test split; prepare it again")
    targets_NT = _as_columns(np.concatenate(targets)) if targets else None
    return TestSplit(np.concatenate(labels).astype(np.int64), targets_NT, tuple(class_names))


def read_predictions(files: Sequence[str], num_samples: int) -> Predictions:
    """Merge the ranks' files and put them into the order of the split.

    Each is an .npz with `index` (int), `kept` (N x K) and, where predicted, `targets` (N x T). RunError if the split is
    empty, a file is unreadable, a sample is missing, repeated or unknown, or a number is not finite.
    """
    if num_samples == 0:
        raise RunError("num_test=0; quality needs test samples; raise data.test_fraction")
    parts = [_read_file(Path(name)) for name in files]
    if not parts:
        raise RunError("there is no prediction file; every rank writes one; look into the ranks' logs")
    index_N = np.concatenate([part["index"] for part in parts]).astype(np.int64)
    known_N = index_N[(index_N >= 0) & (index_N < num_samples)]
    times_N = np.bincount(known_N, minlength=num_samples)
    num_missing, num_repeated = int((times_N == 0).sum()), int((times_N > 1).sum())
    num_unknown = len(index_N) - len(known_N)
    if num_missing or num_repeated or num_unknown:
        raise RunError(
            f"of {num_samples} test samples {num_missing} are missing and {num_repeated} repeated in the predictions, "
            f"and {num_unknown} are unknown; each must occur exactly once; predict the whole test split again"
        )
    order = np.argsort(index_N)
    outputs = np.concatenate([part["kept"] for part in parts])[order].astype(np.float64)
    num_bad = int((~np.isfinite(outputs)).any(axis=1).sum())
    if num_bad:
        fault = f"{num_bad} of {num_samples} predictions are not finite; the model has diverged"
        raise RunError(f"{fault}; lower recipe.learning_rate or use execution.precision=32-true")
    has_targets = all("targets" in part for part in parts)
    targets_NT = _as_columns(np.concatenate([part["targets"] for part in parts])[order]) if has_targets else None
    return Predictions(outputs, targets_NT)


def _read_file(path: Path) -> dict[str, npt.NDArray[np.generic]]:
    try:
        # Opened here: np.load leaves a broken archive's file open. A TypeError means a lone .npy array.
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            part = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise RunError(f"{path} cannot be read ({error}); ranks write .npz files; look into the ranks' logs") from error
    if not {"index", "kept"} <= part.keys() or len(part["index"]) != len(part["kept"]):
        raise RunError(f"{path} has {sorted(part)}; it needs index and kept of equal length; predict again")
    return part


def evaluate_predictions(files: Sequence[str], truth: TestSplit, samples_per_second: float) -> EvaluateResult:
    """Measure the quality of the ranks' predictions; errors as in `read_predictions`."""
    started = time.perf_counter()
    num_samples, num_classes = len(truth.labels_N), len(truth.class_names)
    predictions = read_predictions(files, num_samples)
    logits_NK = predictions.outputs
    if logits_NK.shape[1] != num_classes:
        fault = f"the predictions have {logits_NK.shape[1]} classes and the set {num_classes}"
        raise RunError(f"{fault}; they must be equal; train on this set")
    # Three lines in place of scikit-learn, whose import takes longer than the rest of the evaluation.
    predicted_N, labels_N = logits_NK.argmax(axis=1), truth.labels_N
    counts = np.bincount(labels_N * num_classes + predicted_N, minlength=num_classes**2)
    confusion = counts.reshape(num_classes, num_classes).tolist()
    ranked_NK = np.argsort(logits_NK, axis=1, kind="stable")[:, ::-1]  # ties as in scikit-learn
    return EvaluateResult(
        num_samples=num_samples,
        accuracy=float(np.mean(predicted_N == labels_N)),
        top_k={
            str(k): float(np.mean((ranked_NK[:, :k] == labels_N[:, None]).any(axis=1)))
            for k in TOP_K
            if k < num_classes
        },
        per_class_accuracy={
            name: row[number] / sum(row) if sum(row) else None
            for number, (name, row) in enumerate(zip(truth.class_names, confusion, strict=True))
        },
        confusion=tuple(map(tuple, confusion)),
        angle_rmse_degrees=_angle_rmse(truth.targets_NT, predictions.targets_NT),
        samples_per_second=samples_per_second,
        seconds=time.perf_counter() - started,
    )


def _angle_rmse(true_NT: Floats | None, predicted_NT: Floats | None) -> float | None:
    """Root mean squared error of the first target, degrees; the error is taken the short way round the circle."""
    if true_NT is None or predicted_NT is None:
        return None
    if not np.isfinite(predicted_NT).all():
        raise RunError("a predicted angle is not finite; the model has diverged; lower recipe.learning_rate")
    around_N = np.angle(np.exp(1j * (predicted_NT[:, 0] - true_NT[:, 0])))
    return float(np.degrees(np.sqrt(np.mean(around_N**2))))


def _as_columns(targets: npt.NDArray[np.generic]) -> Floats:
    return targets.astype(np.float64).reshape(len(targets), -1)


def discordant(first: Sequence[str], second: Sequence[str], prepared: PreparedSet) -> tuple[int, int]:
    """Test samples right in the second set of files alone, and in the first alone; see `read_predictions`."""
    truth = read_test_split(Path(prepared.path), prepared.class_names)
    labels_N = truth.labels_N
    before_N, after_N = (
        read_predictions(files, len(labels_N)).outputs.argmax(axis=1) == labels_N for files in (first, second)
    )
    return int((~before_N & after_N).sum()), int((before_N & ~after_N).sum())


def evaluate_statistics(train: TrainResult, prepared: PreparedSet) -> EvaluateResult:
    """Measure the quality of a segmentation or a denoising; errors as in `read_predictions`."""
    started, num_samples = time.perf_counter(), prepared.num_test
    totals = read_predictions(train.predictions, num_samples).outputs.sum(axis=0).tolist()
    facts: dict[str, Any]
    if train.score_name == "mean_iou":
        counts, names, num_classes = totals[1:], prepared.class_names, len(prepared.class_names)
        right, actual = counts[:num_classes], counts[2 * num_classes :]
        recalls = (both / pixels if pixels else None for both, pixels in zip(right, actual, strict=True))
        facts = {
            "accuracy": sum(right) / max(1.0, sum(actual)),
            "per_class_accuracy": dict(zip(names, recalls, strict=True)),
            "mean_iou": mean_iou(counts),
            "per_class_iou": dict(zip(names, ious(counts), strict=True)),
        }
    else:
        _, similar, psnr, noisy_psnr = (total / num_samples for total in totals)
        facts = {"ssim": similar, "psnr_db": psnr, "noisy_psnr_db": noisy_psnr}
    return EvaluateResult(
        num_samples=num_samples,
        score_name=train.score_name,
        samples_per_second=train.prediction_samples_per_second,
        seconds=time.perf_counter() - started,
        **facts,
    )


def score_difference(
    first: Sequence[str], second: Sequence[str], prepared: PreparedSet, score_name: ScoreName
) -> tuple[float, float]:
    """The score of the second set of predictions less that of the first, and its standard error.

    The samples are the same in both, so they are left out one by one in both: the jackknife (Tukey 1958; Efron and
    Stein, "The Jackknife Estimate of Variance", 1981), which only requires a smooth score. Of a mean it is the standard
    error of the mean. The files and errors are those of `read_predictions`.
    """
    num = prepared.num_test
    before_NS, after_NS = (read_predictions(files, num).outputs for files in (first, second))
    before, after = before_NS.sum(axis=0), after_NS.sum(axis=0)
    (difference,) = _scores(after[None], num, score_name) - _scores(before[None], num, score_name)
    without_N = _scores(after - after_NS, num - 1, score_name) - _scores(before - before_NS, num - 1, score_name)
    return float(difference), float(np.sqrt((num - 1) * without_N.var()))


def _scores(totals_MS: Floats, num_samples: int, score_name: ScoreName) -> Floats:
    if score_name == "ssim":
        return totals_MS[:, 1] / max(1, num_samples)
    return np.array([mean_iou(totals) for totals in totals_MS[:, 1:].tolist()])
