"""What a model's answers become in a file of predictions: columns, and what is counted where the source knows better.

A row for each sample of a part, in its order; null where a sample could not be read. Pictures and masks are PNG files,
whole and without loss, as values of a column: a file for each would be as many files as there are images, and a part
would no longer be there at once or not at all. Shapes: N samples that could be read, H height, W width, C channels.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from PIL import Image

from tasks.data.pixels import Pixels
from tasks.predict.heads import Arrays, Asked
from tasks.predict.job import Part
from tasks.records import ModelFacts


@dataclass(frozen=True)
class Counts:
    """How right the answers are, where that is known."""

    num_known: int = 0
    num_correct: int = 0
    class_pixels: tuple[int, ...] = ()


@dataclass(frozen=True)
class Answers:
    """A part's."""

    columns: dict[str, pa.Array]
    counts: Counts = field(default_factory=Counts)


def answers_of(asked: Asked, facts: ModelFacts, part: Part, found: Pixels, arrays: Arrays | None) -> Answers:
    """The columns of a part besides `path` and `error`.

    Args:
        asked: what the model was asked for.
        facts: of the model.
        part: whose samples they are.
        found: the pixels that could be read.
        arrays: what the model says of them; None for a part of which nothing could be read.
    """
    if asked == "features":
        return _features(part, found.kept, arrays)
    if asked == "segment":
        return _masks(facts, part, found, arrays)
    if asked == "denoise":
        return _pictures(part, found, arrays)
    return _classes(facts, part, found.kept, arrays)


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """A PNG file of grey pixels (H, W) or (H, W, 1), or of colours (H, W, 3)."""
    buffer = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[2:] == (1,) else pixels).save(buffer, "png")
    return buffer.getvalue()


def _classes(facts: ModelFacts, part: Part, kept: list[int], arrays: Arrays | None) -> Answers:
    """`label`, `probability`, `probabilities` (in the order of the classes), targets, `true_label`."""
    number = len(part.samples)
    labels, rows = np.full(number, -1), np.full((number, len(facts.class_names)), np.nan, dtype=np.float32)
    if arrays is not None:
        labels[kept], rows[kept] = arrays[0].argmax(1), arrays[0]
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
            values[kept] = arrays[1][:, index]
        columns[name] = pa.array(values, pa.float32(), mask=missing)
    truth = _truth(part)
    # Of classes that the model was not trained on it can only be wrong.
    learned = [position for position in kept if truth[position] in facts.class_names]
    known = [(truth[position], facts.class_names[labels[position]]) for position in learned]
    columns["true_label"] = pa.array(truth, pa.string())
    return Answers(columns, Counts(len(known), sum(true == label for true, label in known)))


def _features(part: Part, kept: list[int], arrays: Arrays | None) -> Answers:
    """`features`, and `true_label`, which classifiers of them are fitted to."""
    values_ND = arrays[0] if arrays is not None else np.zeros((0, 0), np.float32)
    rows = np.zeros((len(part.samples), values_ND.shape[1]), dtype=np.float32)
    missing = np.ones(len(rows), dtype=np.bool_)
    rows[kept], missing[kept] = values_ND, False
    return Answers({"features": _lists(rows, missing), "true_label": pa.array(_truth(part), pa.string())})


def _truth(part: Part) -> list[str | None]:
    """The samples' classes, where they are known; classes of pixels are none of the whole image."""
    if part.num_planes:
        return [None] * len(part.samples)
    return [part.class_names[label] if label >= 0 else None for label in part.samples.labels.tolist()]


def _masks(facts: ModelFacts, part: Part, found: Pixels, arrays: Arrays | None) -> Answers:
    """`mask` (its pixels are classes, from 0), `shares` (of the pixels, in the order of the classes), `confidence`."""
    number, num_classes = len(part.samples), len(facts.class_names)
    classes_NHW, confidence_N = arrays if arrays is not None else (np.zeros((0, 1, 1), np.uint8), np.zeros(0))
    missing = np.ones(number, dtype=np.bool_)
    missing[found.kept] = False
    shares = np.zeros((number, num_classes), dtype=np.float32)
    for position, classes_HW in zip(found.kept, classes_NHW, strict=True):
        shares[position] = np.bincount(classes_HW.ravel(), minlength=num_classes) / classes_HW.size
    columns = {
        "mask": _sparse(number, found.kept, [png(classes_HW) for classes_HW in classes_NHW], pa.binary()),
        "shares": _lists(shares, missing),
        "confidence": _sparse(number, found.kept, confidence_N.tolist(), pa.float32()),
    }
    if not part.num_planes or arrays is None:
        return Answers(columns)
    return Answers(columns, _counted(classes_NHW, found.images_NHWC[..., -1], num_classes))


def _counted(told_NHW: npt.NDArray[np.uint8], masks_NHW: npt.NDArray[np.uint8], num_classes: int) -> Counts:
    """Against masks that are 0 for no class, and 1 and up."""
    known = masks_NHW > 0
    told, there = told_NHW[known], masks_NHW[known] - 1
    counts = [np.bincount(kinds, minlength=num_classes) for kinds in (told[told == there], told, there)]
    return Counts(int(known.sum()), int(counts[0].sum()), tuple(np.concatenate(counts).tolist()))


def _pictures(part: Part, found: Pixels, arrays: Arrays | None) -> Answers:
    """`image`, and `change`: root mean square of what was taken off, of 255."""
    number = len(part.samples)
    told_NHWC = arrays[0] if arrays is not None else np.zeros((0, 1, 1, 1), np.uint8)
    changes = [
        float(np.sqrt(np.square(told.astype(np.float32) - seen[..., : told.shape[-1]]).mean()))
        for told, seen in zip(told_NHWC, found.images_NHWC, strict=True)
    ]
    return Answers(
        {
            "image": _sparse(number, found.kept, [png(told) for told in told_NHWC], pa.binary()),
            "change": _sparse(number, found.kept, changes, pa.float32()),
        }
    )


def _sparse(number: int, kept: list[int], values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """A column with values at some positions and nulls at all others."""
    column: list[Any] = [None] * number
    for position, value in zip(kept, values, strict=True):
        column[position] = value
    return pa.array(column, kind)


def _lists(rows_NK: npt.NDArray[np.float32], missing_N: npt.NDArray[np.bool_]) -> pa.ListArray:
    """A list for each row, null where it is missing. Not of fixed size: Parquet cannot be read back with nulls then."""
    ends = np.cumsum(np.where(missing_N, 0, rows_NK.shape[1])).astype(np.int32)
    starts = pa.array([0, *ends], pa.int32(), mask=np.append(missing_N, False))
    return pa.ListArray.from_arrays(starts, pa.array(rows_NK[~missing_N].ravel()))
