"""One part of a prediction, as a worker does it: read images, predict, write one Parquet file.

A file has a row for each sample, in order; null where a sample could not be read. Pictures and masks are PNG files as
values of a column, so that a part is one file. A device that predicts faster than one thread decodes gets blocks of
samples, read by several threads. Shapes: N samples that could be read, H height, W width, C channels.
"""

import io
import json
import math
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from paceline.tasks.data.decode.map_ahead import map_ahead
from paceline.tasks.data.decode.pixels import Pixels, read_pixels, read_whole
from paceline.tasks.data.decode.transform import DecodeError, UnreadError
from paceline.tasks.data.listing import Origin
from paceline.tasks.data.samples import Samples
from paceline.tasks.data.sources.registry import spec_of
from paceline.tasks.data.storage.read_files import count_reads
from paceline.tasks.files import write_durably
from paceline.tasks.predict.job import Images, Parity, Part, PartRecord, Settings
from paceline.tasks.predict.outputs import Arrays, Asked
from paceline.tasks.predict.predictor import Predictor, parity, predictor
from paceline.tasks.records.data import ModelFacts, Reads

PARITY_PIXELS = 2**21  # pixels of images at their own sizes that are compared with the plain model
BLOCK_BYTES = 2**20  # pixels of a block: a few photographs, so that the first ones are soon there
AHEAD = 2  # blocks for each thread that are read or wait for the device
METADATA = b"paceline"  # key of the metadata in a file
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


@dataclass
class Progress:
    """What became of the samples of a part so far."""

    reasons: dict[int, str] = field(default_factory=dict)  # by the positions of those that could not be read
    num_unread: int = 0
    read_seconds: float = 0.0
    predict_seconds: float = 0.0


def predict_part(part: Part, settings: Settings) -> PartRecord:
    """Predict a part and write its file; InputError if the model or the source cannot be opened from here."""
    model, samples, progress = predictor(settings), part.images.samples, Progress()
    with count_reads() as tally:
        answers, counts = _predict(part, model, progress, own_size=settings.own_size)
    record = PartRecord(
        number=part.number,
        num_samples=len(samples) - len(progress.reasons),
        num_rejected=len(progress.reasons),
        num_unread=progress.num_unread,
        read_seconds=progress.read_seconds,
        predict_seconds=progress.predict_seconds,
        reads=tally.reads,
        **counts._asdict(),
    )
    reasons = [progress.reasons.get(position) for position in range(len(samples))]
    paths = pa.array([sample.text for sample in samples], pa.string())
    columns = {"path": paths, **answers, "error": pa.array(reasons, pa.string())}
    metadata = {METADATA: json.dumps({"key": part.key, "record": record.model_dump(mode="json")})}
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), buffer, compression="zstd")
    write_durably(Path(part.path), buffer.getbuffer())
    return record


def _predict(part: Part, model: Predictor, progress: Progress, *, own_size: bool) -> Answers:
    if own_size:
        rows = _predict_own_sizes(part, model, progress)
    elif model.asked in PIXEL_TASKS:
        channels = model.facts.image_shape[2]
        rows = (
            Row(position, image_HWC[..., :channels], image_HWC[..., -1] if part.images.num_planes else None, outputs)
            for members, images_NHWC, arrays in _predict_batches(part, model, progress)
            for position, image_HWC, *outputs in zip(members, images_NHWC, *arrays, strict=True)
        )
    else:
        positions: list[int] = []
        batches: list[Arrays] = []
        for members, _, arrays in _predict_batches(part, model, progress):
            positions += members
            batches.append(arrays)
        joined = tuple(map(np.concatenate, zip(*batches, strict=True))) if batches else None
        return answers_of(model.asked, model.facts, part.images, positions, joined)
    return pixel_answers_of(model.asked, model.facts, len(part.images.samples), rows)


def _predict_batches(
    part: Part, model: Predictor, progress: Progress
) -> Iterator[tuple[list[int], npt.NDArray[np.uint8], Arrays]]:
    """Positions, pixels and outputs of one batch after the other. On a GPU the next ones are read meanwhile."""
    size, _, channels = model.facts.image_shape
    origin, samples, _, _, num_planes = part.images
    batch_size = model.batch_size(model.facts.image_shape)
    started = time.perf_counter()
    with closing(read_ahead(origin, samples, size, channels + num_planes, model.num_readers)) as blocks:
        for members, images_NHWC in cut_batches(blocks, batch_size, progress):
            read = time.perf_counter()
            progress.read_seconds += read - started
            arrays = model(np.ascontiguousarray(images_NHWC[..., :channels]))
            started = time.perf_counter()
            progress.predict_seconds += started - read
            yield members, images_NHWC, arrays


def read_ahead(
    origin: Origin, samples: Samples, image_size: int, channels: int, num_threads: int
) -> Generator[tuple[int, Pixels]]:
    """Read samples in order; yields the place of a block's first sample, and its pixels. Errors as in `read_pixels`.

    With 0 threads all samples are one block, read by the caller's thread: on a CPU other threads would only take cores
    from the network. A table is one block too, because its rows are decoded from the beginning of a group.
    """
    if num_threads == 0:
        yield 0, read_pixels(origin, samples, image_size, channels)
        return
    num_block = len(samples) if spec_of(origin).has_rows else max(1, BLOCK_BYTES // (image_size**2 * channels))
    # The context holds the counter of remote reads, and is of one thread at a time.
    blocks = ((start, copy_context()) for start in range(0, len(samples), num_block))

    def read(block: tuple[int, Context]) -> Pixels:
        start, context = block
        return context.run(read_pixels, origin, samples[start : start + num_block], image_size, channels)

    with (
        ThreadPoolExecutor(num_threads, thread_name_prefix="paceline-decode") as pool,
        closing(map_ahead(pool, read, blocks, AHEAD * num_threads - 1)) as results,
    ):
        for (start, _), pixels in results:
            yield start, pixels


def cut_batches(
    blocks: Iterable[tuple[int, Pixels]], size: int, progress: Progress
) -> Iterator[tuple[list[int], npt.NDArray[np.uint8]]]:
    """Cut blocks into positions and images (N, H, W, C) of batches of one size, whatever was rejected between them."""
    positions: list[int] = []
    images: list[npt.NDArray[np.uint8]] = []
    for first, pixels in blocks:
        progress.reasons |= {first + position: reason for position, reason in pixels.reasons.items()}
        progress.num_unread += pixels.num_unread
        positions += [first + position for position in pixels.positions]
        images.append(pixels.images_NHWC)
        while len(positions) >= size:
            joined_NHWC = np.concatenate(images) if len(images) > 1 else images[0]
            yield positions[:size], joined_NHWC[:size]
            positions, images = positions[size:], [joined_NHWC[size:]]
    if positions:
        yield positions, np.concatenate(images)


def _predict_own_sizes(part: Part, model: Predictor, progress: Progress) -> Iterator[Row]:
    """Predict one sample after the other, because each may be large."""
    images = read_whole(part.images.origin, part.images.samples, model.facts.image_shape[0])
    for position in range(len(part.images.samples)):
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


def finished_record(part: Part) -> PartRecord | None:
    """The record of a part that an earlier call wrote for this prediction, with the bytes of all samples; or None."""
    try:
        metadata = json.loads(pq.read_schema(part.path).metadata[METADATA])
        record = PartRecord.model_validate(metadata["record"])
        return record if metadata["key"] == part.key and not record.num_unread else None
    except (OSError, KeyError, TypeError, ValueError, pa.ArrowException):
        return None


def check_parity(part: Part, settings: Settings) -> tuple[Parity | None, Reads]:
    """Compare the executed model with the plain one on a part's first images (None: none readable), and count reads."""
    facts = predictor(settings).facts
    size, _, channels = facts.image_shape
    origin, samples, _, _, num_planes = part.images
    with count_reads() as tally:
        if not settings.own_size:
            pixels = read_pixels(origin, samples, size, channels + num_planes)
            images_NHWC = np.ascontiguousarray(pixels.images_NHWC[..., :channels])
            return parity(settings, images_NHWC) if pixels.positions else None, tally.reads
        pictures: list[npt.NDArray[np.uint8]] = []
        num_pixels = 0
        for image in read_whole(origin, samples, size):
            if not isinstance(image, DecodeError):
                pictures.append(_as_channels(image[0], facts))
                num_pixels += image[0].shape[0] * image[0].shape[1]
                if num_pixels >= PARITY_PIXELS:
                    break
        return parity(settings, pictures) if pictures else None, tally.reads


def _as_channels(picture_HWC: npt.NDArray[np.uint8], facts: ModelFacts) -> npt.NDArray[np.uint8]:
    return np.broadcast_to(picture_HWC, (*picture_HWC.shape[:2], facts.image_shape[2]))


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
