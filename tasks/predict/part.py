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
from tasks.predict.columns import answers_of
from tasks.predict.job import Parity, Part, PartRecord, Settings
from tasks.predict.predictor import parity, predictor
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
    found = _read(part, model.facts)
    read = time.perf_counter()
    arrays = model(_pictures(found, model.facts)) if found.kept else None
    ended = time.perf_counter()
    answers = answers_of(model.asked, model.facts, part, found, arrays)
    record = PartRecord(
        number=part.number,
        num_samples=len(found.kept),
        num_rejected=len(found.reasons),
        num_known=answers.counts.num_known,
        num_correct=answers.counts.num_correct,
        class_pixels=answers.counts.class_pixels,
        read_seconds=read - started,
        predict_seconds=ended - read,
    )
    reasons = [found.reasons.get(position) for position in range(len(part.samples))]
    columns = {
        "path": pa.array([sample.text for sample in part.samples], pa.string()),
        **answers.columns,
        "error": pa.array(reasons, pa.string()),
    }
    _write(part, pa.table(columns), record)
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
    facts = predictor(settings).facts
    found = _read(part, facts)
    return parity(settings, _pictures(found, facts)) if found.kept else None


def _read(part: Part, facts: ModelFacts) -> Pixels:
    size, _, channels = facts.image_shape
    return read_pixels(part.origin, part.samples, size, channels + part.num_planes)


def _pictures(found: Pixels, facts: ModelFacts) -> npt.NDArray[np.uint8]:
    """Without the masks behind them."""
    return np.ascontiguousarray(found.images_NHWC[..., : facts.image_shape[2]])


def _write(part: Part, table: pa.Table, record: PartRecord) -> None:
    said = {"key": part.key, "record": record.model_dump(mode="json")}
    buffer = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({METADATA: json.dumps(said)}), buffer, compression="zstd")
    write_durably(Path(part.path), buffer.getbuffer())
