"""One part of a prediction, as a worker does it: read images, predict, write one Parquet file.

Knows nothing of Dask or of other parts. A file has a row for every sample, also for those that could not be read.
"""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.data.pixels import Pixels, read_pixels
from tasks.durable import write_durably
from tasks.predict.job import Parity, Part, PartRecord, Settings
from tasks.predict.predictor import Predicted, parity, predictor
from tasks.records import ModelFacts

METADATA = b"paceline"
"""Under which a file says what it is."""


def predict_part(part: Part, settings: Settings) -> PartRecord:
    """Predict a part and write its file.

    Raises:
        InputError: the model or the source cannot be opened from here.
        OSError: the disk is full or cannot be written.
    """
    model = predictor(settings)
    started = time.perf_counter()
    pixels_NHWC, _, kept, reasons = _read(part, model.facts)
    read = time.perf_counter()
    nothing = np.zeros((0, len(model.facts.class_names)), dtype=np.float32)
    probabilities_NK, targets_NT = model(pixels_NHWC) if kept else (nothing, None)
    ended = time.perf_counter()
    truth = [part.class_names[label] if label >= 0 else None for label in part.samples.labels.tolist()]
    found = [model.facts.class_names[label] for label in probabilities_NK.argmax(1)] if kept else []
    known = [(truth[position], label) for position, label in zip(kept, found, strict=True) if truth[position]]
    record = PartRecord(
        number=part.number,
        num_samples=len(kept),
        num_rejected=len(reasons),
        num_known=len(known),
        num_correct=sum(true == label for true, label in known),
        read_seconds=read - started,
        predict_seconds=ended - read,
    )
    table = _table(part, model.facts, kept, reasons, truth, (probabilities_NK, targets_NT))
    _write(part, table, record)
    return record


def finished(part: Part) -> PartRecord | None:
    """What is known of a part that an earlier call has written; None if there is none, or of another prediction."""
    try:
        said = json.loads(pq.read_schema(part.path).metadata[METADATA])
        return PartRecord.model_validate(said["record"]) if said["key"] == part.key else None
    except (OSError, KeyError, TypeError, ValueError, pa.ArrowException):
        return None


def check_parity(part: Part, settings: Settings) -> Parity | None:
    """The model as it is executed against the plain one, on a part's first images; None if none can be read."""
    found = _read(part, predictor(settings).facts)
    return parity(settings, found.images_NHWC) if found.kept else None


def _read(part: Part, facts: ModelFacts) -> Pixels:
    size, _, channels = facts.image_shape
    return read_pixels(part.origin, part.samples, size, channels)


def _table(
    part: Part,
    facts: ModelFacts,
    kept: list[int],
    reasons: dict[int, str],
    truth: list[str | None],
    predicted: Predicted,
) -> pa.Table:
    """`path`, `label`, `probability`, `probabilities` (in the order of the classes), targets, `true_label`, `error`."""
    probabilities_NK, targets_NT = predicted
    number = len(part.samples)
    labels, rows = np.full(number, -1), np.full((number, len(facts.class_names)), np.nan, dtype=np.float32)
    labels[kept], rows[kept] = probabilities_NK.argmax(1) if kept else [], probabilities_NK
    missing = labels < 0
    names = pa.array(facts.class_names, pa.string())
    columns = {
        "path": pa.array([sample.text for sample in part.samples], pa.string()),
        "label": names.take(pa.array(np.maximum(labels, 0), mask=missing)),
        "probability": pa.array(rows.max(1), pa.float32(), mask=missing),
        "probabilities": _lists(rows, missing),
    }
    for index, name in enumerate(facts.target_names):
        values = np.full(number, np.nan, dtype=np.float32)
        if targets_NT is not None:
            values[kept] = targets_NT[:, index]
        columns[name] = pa.array(values, pa.float32(), mask=missing)
    columns["true_label"] = pa.array(truth, pa.string())
    columns["error"] = pa.array([reasons.get(position) for position in range(number)], pa.string())
    return pa.table(columns)


def _lists(rows_NK: npt.NDArray[np.float32], missing_N: npt.NDArray[np.bool_]) -> pa.ListArray:
    """A list for each row, null where it is missing. Not of fixed size: Parquet cannot be read back with nulls then."""
    ends = np.cumsum(np.where(missing_N, 0, rows_NK.shape[1])).astype(np.int32)
    starts = pa.array([0, *ends], pa.int32(), mask=np.append(missing_N, False))
    return pa.ListArray.from_arrays(starts, pa.array(rows_NK[~missing_N].ravel()))


def _write(part: Part, table: pa.Table, record: PartRecord) -> None:
    said = {"key": part.key, "record": record.model_dump(mode="json")}
    buffer = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({METADATA: json.dumps(said)}), buffer, compression="zstd")
    write_durably(Path(part.path), buffer.getbuffer())
