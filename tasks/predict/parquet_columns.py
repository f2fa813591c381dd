"""Columns of a file of predictions, and counts where labels are known.

A row for each sample of a part, in its order; null where a sample could not be read. Pictures and masks are PNG files
as values of a column, so that a part is one file. Shapes: N samples that could be read, H height, W width, C channels.
"""

import io
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from PIL import Image

from paceline.tasks.predict.job import Images
from paceline.tasks.predict.outputs import Arrays, Asked
from paceline.tasks.records.data import ModelFacts

PIXEL_TASKS = ("segment", "denoise")  # tasks with outputs per pixel
_ROWS = 256


class Counts(NamedTuple):
    """Correct predictions where labels are known, as in `PartRecord`."""

    num_known: int = 0
    num_correct: int = 0
    class_pixels: tuple[int, ...] = ()


Answers = tuple[dict[str, pa.Array], Counts]  # of a part


class Row(NamedTuple):
    """Output per pixel of a sample."""

    position: int  # of the sample among the part's
    picture_HWC: npt.NDArray[np.uint8]
    mask_HW: npt.NDArray[np.uint8] | None  # where the source has one: 1 for the first class, 0 for none
    outputs: Sequence[Any]  # as `paceline.tasks.predict.outputs.Arrays` has it, of this sample


def answers_of(asked: Asked, facts: ModelFacts, images: Images, positions: list[int], arrays: Arrays | None) -> Answers:
    """The columns of a part besides `path` and `error`, where they are of whole samples.

    `features`, or `label`, `probability`, `probabilities` (in the order of the classes) and targets; `true_label`.
    """
    number = len(images.samples)
    truth: list[str | None] = [None] * number
    if not images.num_planes:  # classes of pixels are none of the whole image
        truth = [images.class_names[label] if label >= 0 else None for label in images.samples.labels.tolist()]
    if asked == "features":
        values_ND = arrays[0] if arrays is not None else np.zeros((0, 0), np.float32)
        rows, missing = np.zeros((number, values_ND.shape[1]), dtype=np.float32), np.ones(number, dtype=np.bool_)
        rows[positions], missing[positions] = values_ND, False
        # Classifiers of the features are fitted to `true_label`.
        return {"features": _lists(rows, missing), "true_label": pa.array(truth, pa.string())}, Counts()
    labels, rows = np.full(number, -1), np.full((number, len(facts.class_names)), np.nan, dtype=np.float32)
    if arrays is not None:
        labels[positions], rows[positions] = arrays[0].argmax(1), arrays[0]
    missing = labels < 0
    names = pa.array(facts.class_names, pa.string())
    columns = {
        "label": names.take(pa.array(np.maximum(labels, 0), mask=missing)),
        "probability": pa.array(rows.max(1), pa.float32(), mask=missing),
        "probabilities": _lists(rows, missing),
    }
    for index, name in enumerate(facts.target_names):
        values = np.full(number, np.nan, dtype=np.float32)
        if arrays is not None and len(arrays) > 1:
            values[positions] = arrays[1][:, index]
        columns[name] = pa.array(values, pa.float32(), mask=missing)
    # Of classes that the model was not trained on it can only be wrong.
    learned = [position for position in positions if truth[position] in facts.class_names]
    num_correct = sum(truth[position] == facts.class_names[labels[position]] for position in learned)
    columns["true_label"] = pa.array(truth, pa.string())
    return columns, Counts(len(learned), num_correct)


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """A PNG file of grey pixels (H, W) or (H, W, 1), or of colours (H, W, 3)."""
    buffer = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[2:] == (1,) else pixels).save(buffer, "png")
    return buffer.getvalue()


def pixel_answers_of(asked: Asked, facts: ModelFacts, number: int, rows: Iterable[Row]) -> Answers:
    """The same where they are of pixels; no more than one row need exist at a time.

    `mask` (its pixels are classes, from 0), `shares` (of the pixels, in the order of the classes) and `confidence`; or
    `image` and `change`: root mean square of the noise that was removed, of 255.
    """
    num_classes = len(facts.class_names)
    images: list[bytes | None] = [None] * number
    values: list[float | None] = [None] * number
    if asked != "segment":
        for position, picture_HWC, _, (pixels_HWC,) in rows:
            images[position] = png(pixels_HWC)
            bands = (slice(top, top + _ROWS) for top in range(0, len(pixels_HWC), _ROWS))  # the picture may be large
            squares = (np.square(pixels_HWC[band].astype(np.float32) - picture_HWC[band]) for band in bands)
            total = sum(float(square.sum(dtype=np.float64)) for square in squares)
            values[position] = math.sqrt(total / pixels_HWC.size)
        return {"image": pa.array(images, pa.binary()), "change": pa.array(values, pa.float32())}, Counts()
    shares, counts_3K = np.zeros((number, num_classes), dtype=np.float32), np.zeros((3, num_classes), dtype=np.int64)
    for position, _, mask_HW, (classes_HW, confidence) in rows:
        images[position] = png(classes_HW)
        values[position] = float(np.mean(confidence))
        shares[position] = np.bincount(classes_HW.ravel(), minlength=num_classes) / classes_HW.size
        if mask_HW is not None:  # 0 for no class, and 1 and up; preparation rejects images with other values
            is_known_HW = (mask_HW > 0) & (mask_HW <= num_classes)
            predicted, actual = classes_HW[is_known_HW], mask_HW[is_known_HW] - 1
            kinds = predicted[predicted == actual], predicted, actual
            counts_3K += np.stack([np.bincount(kind, minlength=num_classes) for kind in kinds])
    columns = {
        "mask": pa.array(images, pa.binary()),
        "shares": _lists(shares, np.array([image is None for image in images])),
        "confidence": pa.array(values, pa.float32()),
    }
    num_correct, _, num_known = counts_3K.sum(1).tolist()
    return columns, Counts(num_known, num_correct, tuple(counts_3K.ravel().tolist()) if counts_3K.any() else ())


def _lists(rows_NK: npt.NDArray[np.float32], missing_N: npt.NDArray[np.bool_]) -> pa.ListArray:
    """A list for each row, null where it is missing. Not of fixed size: Parquet cannot be read back with nulls then."""
    ends = np.cumsum(np.where(missing_N, 0, rows_NK.shape[1])).astype(np.int32)
    starts = pa.array([0, *ends], pa.int32(), mask=np.append(missing_N, False))
    return pa.ListArray.from_arrays(starts, pa.array(rows_NK[~missing_N].ravel()))
