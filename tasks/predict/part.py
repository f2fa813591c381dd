"""One part of a prediction, as a worker does it: read images, predict, write one Parquet file.

A file has a row for every sample, also for those that could not be read.
"""

import io
import json
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from paceline.tasks.data.decode.pixels import read_pixels, read_whole
from paceline.tasks.data.decode.transform import DecodeError, UnreadError
from paceline.tasks.data.storage.read_files import count_reads
from paceline.tasks.files import write_durably
from paceline.tasks.predict.job import Parity, Part, PartRecord, Settings
from paceline.tasks.predict.outputs import Arrays
from paceline.tasks.predict.parquet_columns import PIXEL_TASKS, Answers, Row, answers_of, pixel_answers_of
from paceline.tasks.predict.predictor import Predictor, parity, parity_of_whole, predictor
from paceline.tasks.predict.prefetch import PixelBatch, read_ahead
from paceline.tasks.records.data import ModelFacts, Reads

PARITY_PIXELS = 2**21  # pixels of images at their own sizes that are compared with the plain model
METADATA = b"paceline"  # key of the metadata in a file


def predict_part(part: Part, settings: Settings) -> PartRecord:
    """Predict a part and write its file; InputError if the model or the source cannot be opened from here."""
    model = predictor(settings)
    progress = _Seen()
    with count_reads() as tally:
        answers = _at_own_sizes(part, model, progress) if settings.own_size else _at_one_size(part, model, progress)
    record = PartRecord(
        number=part.number,
        num_samples=len(part.samples) - len(progress.reasons),
        num_rejected=len(progress.reasons),
        num_unread=progress.num_unread,
        num_known=answers.counts.num_known,
        num_correct=answers.counts.num_correct,
        class_pixels=answers.counts.class_pixels,
        read_seconds=progress.read_seconds,
        predict_seconds=progress.predict_seconds,
        reads=tally.reads,
    )
    reasons = [progress.reasons.get(position) for position in range(len(part.samples))]
    columns = {
        "path": pa.array([sample.text for sample in part.samples], pa.string()),
        **answers.columns,
        "error": pa.array(reasons, pa.string()),
    }
    metadata = {METADATA: json.dumps({"key": part.key, "record": record.model_dump(mode="json")})}
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), buffer, compression="zstd")
    write_durably(Path(part.path), buffer.getbuffer())
    return record


@dataclass
class _Seen:
    reasons: dict[int, str] = field(default_factory=dict)
    num_unread: int = 0
    read_seconds: float = 0.0
    predict_seconds: float = 0.0


def _at_one_size(part: Part, model: Predictor, progress: _Seen) -> Answers:
    if model.asked not in PIXEL_TASKS:
        positions: list[int] = []
        batches: list[Arrays] = []
        for members, _, arrays in _predict_batches(part, model, progress):
            positions += members
            batches.append(arrays)
        joined = tuple(map(np.concatenate, zip(*batches, strict=True))) if batches else None
        return answers_of(model.asked, model.facts, part, positions, joined)
    channels = model.facts.image_shape[2]
    rows = (
        Row(position, image_HWC[..., :channels], image_HWC[..., -1] if part.num_planes else None, outputs)
        for members, images_NHWC, arrays in _predict_batches(part, model, progress)
        for position, image_HWC, *outputs in zip(members, images_NHWC, *arrays, strict=True)
    )
    return pixel_answers_of(model.asked, model.facts, part, rows)


def _predict_batches(
    part: Part, model: Predictor, progress: _Seen
) -> Iterator[tuple[list[int], npt.NDArray[np.uint8], Arrays]]:
    """Positions, pixels and outputs of one batch after the other. On a GPU the next ones are read meanwhile."""
    size, _, channels = model.facts.image_shape
    batch = PixelBatch(model.batch_size(model.facts.image_shape))
    started = time.perf_counter()

    def predict(*, rest: bool) -> Iterator[tuple[list[int], npt.NDArray[np.uint8], Arrays]]:
        nonlocal started
        for members, images_NHWC in batch.take(rest=rest):
            read = time.perf_counter()
            progress.read_seconds += read - started
            arrays = model(np.ascontiguousarray(images_NHWC[..., :channels]))
            started = time.perf_counter()
            progress.predict_seconds += started - read
            yield members, images_NHWC, arrays

    blocks = read_ahead(part.origin, part.samples, size, channels + part.num_planes, model.num_readers)
    with closing(blocks):
        for first, pixels in blocks:
            progress.reasons |= {first + position: reason for position, reason in pixels.reasons.items()}
            progress.num_unread += pixels.num_unread
            batch.add(first, pixels)
            yield from predict(rest=False)
    yield from predict(rest=True)


def _at_own_sizes(part: Part, model: Predictor, progress: _Seen) -> Answers:
    """Predict one sample after the other, because each may be large."""
    size = model.facts.image_shape[0]

    def rows() -> Iterator[Row]:
        images = read_whole(part.origin, part.samples, size)
        for position in range(len(part.samples)):
            started = time.perf_counter()
            image = next(images)
            read = time.perf_counter()
            progress.read_seconds += read - started
            if isinstance(image, DecodeError):
                progress.reasons[position] = str(image)
                progress.num_unread += isinstance(image, UnreadError)
                continue
            picture_HWC = _as_channels(image[0], model.facts)
            outputs = model.whole(picture_HWC)
            progress.predict_seconds += time.perf_counter() - read
            yield Row(position, picture_HWC, image[1], outputs)

    return pixel_answers_of(model.asked, model.facts, part, rows())


def finished_record(part: Part) -> PartRecord | None:
    """The record of a part that an earlier call wrote for this prediction, with the bytes of all samples; or None."""
    try:
        metadata = json.loads(pq.read_schema(part.path).metadata[METADATA])
        record = PartRecord.model_validate(metadata["record"])
        return record if metadata["key"] == part.key and not record.num_unread else None
    except (OSError, KeyError, TypeError, ValueError, pa.ArrowException):
        return None


def check_parity(part: Part, settings: Settings) -> tuple[Parity | None, Reads]:
    """Compare the executed model with the plain one on a part's first images; None if none can be read.

    Also returns the remote reads.
    """
    with count_reads() as tally:
        return _parity(part, settings), tally.reads


def _parity(part: Part, settings: Settings) -> Parity | None:
    facts = predictor(settings).facts
    if not settings.own_size:
        size, _, channels = facts.image_shape
        pixels = read_pixels(part.origin, part.samples, size, channels + part.num_planes)
        images_NHWC = np.ascontiguousarray(pixels.images_NHWC[..., :channels])
        return parity(settings, images_NHWC) if pixels.positions else None
    pictures: list[npt.NDArray[np.uint8]] = []
    num_pixels = 0
    for image in read_whole(part.origin, part.samples, facts.image_shape[0]):
        if not isinstance(image, DecodeError):
            pictures.append(_as_channels(image[0], facts))
            num_pixels += image[0].shape[0] * image[0].shape[1]
            if num_pixels >= PARITY_PIXELS:
                break
    return parity_of_whole(settings, pictures) if pictures else None


def _as_channels(picture_HWC: npt.NDArray[np.uint8], facts: ModelFacts) -> npt.NDArray[np.uint8]:
    return np.broadcast_to(picture_HWC, (*picture_HWC.shape[:2], facts.image_shape[2]))
