"""One part of a prediction, as a worker does it: read images, predict, write one Parquet file.

Knows nothing of Dask or of other parts. A file has a row for every sample, also for those that could not be read.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from paceline.tasks.data.decode.pixels import Pixels, read_pixels, read_whole
from paceline.tasks.data.decode.transform import DecodeError, UnreadError
from paceline.tasks.data.storage.read_files import count_reads
from paceline.tasks.files import write_durably
from paceline.tasks.predict.job import Parity, Part, PartRecord, Settings
from paceline.tasks.predict.parquet_columns import PIXEL_TASKS, Answers, Row, answers_of, pixel_answers_of
from paceline.tasks.predict.predictor import Predictor, parity, parity_of_whole, predictor
from paceline.tasks.records import ModelFacts, Reads

PARITY_PIXELS = 2**21
"""Of images at their own sizes, so many are held against the plain model."""
METADATA = b"paceline"
"""Under which a file says what it is."""


def predict_part(part: Part, settings: Settings) -> PartRecord:
    """Predict a part and write its file.

    Raises:
        InputError: the model or the source cannot be opened from here.
        OSError: the disk is full or cannot be written.
    """
    model = predictor(settings)
    seen = _Seen()
    with count_reads() as tally:
        answers = _at_own_sizes(part, model, seen) if settings.own_size else _at_one_size(part, model, seen)
    record = PartRecord(
        number=part.number,
        num_samples=len(part.samples) - len(seen.reasons),
        num_rejected=len(seen.reasons),
        num_unread=seen.num_unread,
        num_known=answers.counts.num_known,
        num_correct=answers.counts.num_correct,
        class_pixels=answers.counts.class_pixels,
        read_seconds=seen.read_seconds,
        predict_seconds=seen.predict_seconds,
        reads=tally.reads,
    )
    reasons = [seen.reasons.get(position) for position in range(len(part.samples))]
    columns = {
        "path": pa.array([sample.text for sample in part.samples], pa.string()),
        **answers.columns,
        "error": pa.array(reasons, pa.string()),
    }
    _write(part, pa.table(columns), record)
    return record


@dataclass
class _Seen:
    """What was seen of a part's samples."""

    reasons: dict[int, str] = field(default_factory=dict)
    num_unread: int = 0
    read_seconds: float = 0.0
    predict_seconds: float = 0.0


def _at_one_size(part: Part, model: Predictor, seen: _Seen) -> Answers:
    """All of it at once: read, then predicted."""
    started = time.perf_counter()
    found = _read(part, model.facts)
    read = time.perf_counter()
    arrays = model(_pictures(found, model.facts)) if found.kept else None
    seen.reasons, seen.num_unread = found.reasons, found.num_unread
    seen.read_seconds, seen.predict_seconds = read - started, time.perf_counter() - read
    if model.asked not in PIXEL_TASKS:
        return answers_of(model.asked, model.facts, part, found.kept, arrays)
    channels = model.facts.image_shape[2]
    rows = [
        Row(position, image_HWC[..., :channels], image_HWC[..., -1] if part.num_planes else None, told)
        for position, image_HWC, *told in zip(found.kept, found.images_NHWC, *(arrays or ()), strict=True)
    ]
    return pixel_answers_of(model.asked, model.facts, part, rows)


def _at_own_sizes(part: Part, model: Predictor, seen: _Seen) -> Answers:
    """One sample after the other, for each may be large."""
    size = model.facts.image_shape[0]

    def rows() -> Iterator[Row]:
        images = read_whole(part.origin, part.samples, size)
        for position in range(len(part.samples)):
            started = time.perf_counter()
            found = next(images)
            read = time.perf_counter()
            seen.read_seconds += read - started
            if isinstance(found, DecodeError):
                seen.reasons[position] = str(found)
                seen.num_unread += isinstance(found, UnreadError)
                continue
            picture_HWC = _coloured(found[0], model.facts)
            told = model.whole(picture_HWC)
            seen.predict_seconds += time.perf_counter() - read
            yield Row(position, picture_HWC, found[1], told)

    return pixel_answers_of(model.asked, model.facts, part, rows())


def finished(part: Part) -> PartRecord | None:
    """What is known of a part that an earlier call has written.

    None if there is none, or of another prediction, or where some samples' bytes could not be had.
    """
    try:
        said = json.loads(pq.read_schema(part.path).metadata[METADATA])
        record = PartRecord.model_validate(said["record"])
        return record if said["key"] == part.key and not record.num_unread else None
    except (OSError, KeyError, TypeError, ValueError, pa.ArrowException):
        return None


def check_parity(part: Part, settings: Settings) -> tuple[Parity | None, Reads]:
    """The model as it is executed against the plain one, on a part's first images; None if none can be read.

    Also what was read from afar for it.
    """
    with count_reads() as tally:
        return _parity(part, settings), tally.reads


def _parity(part: Part, settings: Settings) -> Parity | None:
    facts = predictor(settings).facts
    if settings.own_size:
        pictures = list(_few(part, facts))
        return parity_of_whole(settings, pictures) if pictures else None
    found = _read(part, facts)
    return parity(settings, _pictures(found, facts)) if found.kept else None


def _few(part: Part, facts: ModelFacts) -> Iterator[npt.NDArray[np.uint8]]:
    """Images at their own sizes, as many as make a large one."""
    num_pixels = 0
    for found in read_whole(part.origin, part.samples, facts.image_shape[0]):
        if not isinstance(found, DecodeError):
            yield _coloured(found[0], facts)
            num_pixels += found[0].shape[0] * found[0].shape[1]
            if num_pixels >= PARITY_PIXELS:
                return


def _coloured(picture_HWC: npt.NDArray[np.uint8], facts: ModelFacts) -> npt.NDArray[np.uint8]:
    """With the channels that the model takes; grey is the same in all of them."""
    return np.broadcast_to(picture_HWC, (*picture_HWC.shape[:2], facts.image_shape[2]))


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
