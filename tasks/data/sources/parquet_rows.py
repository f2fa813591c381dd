"""Rows of a Parquet file of images: the row groups that hold them are decoded, a few rows at a time.

A column `image` with encoded files (bytes, or a structure that has them as `bytes`) or pixels (lists of lists of whole
numbers), and a column `label`.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from paceline.tasks.data.decode.transform import DecodeError
from paceline.tasks.data.sources.arrays import BLOCK_BYTES, COLOURS, Row, Table, open_file
from paceline.tasks.errors import InputError

IMAGE, LABEL = "image", "label"
BATCH_ROWS = 64


def table(root: str, path: str) -> Table:
    """The table without its pixels."""
    with open_file(root, path) as stream:
        file = pq.ParquetFile(stream)
        schema = file.schema_arrow
        if not {IMAGE, LABEL} <= set(schema.names):
            raise InputError(f"has the columns {', '.join(schema.names)}; it needs {IMAGE} and {LABEL}")
        column = file.read(columns=[LABEL])[LABEL]
    if column.null_count:
        raise InputError(f"{column.null_count} of {len(column)} images have no label; give each one")
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    kind, are_numbers = column.type, pa.types.is_integer(column.type)
    if not (are_numbers or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise InputError(f"{LABEL} holds {kind}; give one whole number or word for each image")
    labels = np.array(column.to_pylist(), dtype=np.int64 if are_numbers else np.str_)
    try:  # as Hugging Face's `datasets` writes them
        names = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"][LABEL]["names"]
    except (KeyError, TypeError, ValueError):
        names = ()
    return Table(labels, _channels(schema.field(IMAGE).type), tuple(names))


def _channels(kind: pa.DataType) -> int:
    if holds_files(kind):
        return COLOURS
    depth = 0
    while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        kind, depth = kind.value_type, depth + 1
    if depth not in (2, 3) or not pa.types.is_integer(kind):
        raise InputError(
            f"{IMAGE} holds {kind} in {depth} lists; give encoded files as bytes, or whole numbers from 0 to 255 in "
            "lists (height, width) or (height, width, 3)"
        )
    return 1 if depth == 2 else COLOURS  # noqa: PLR2004


def holds_files(kind: pa.DataType) -> bool:
    """Whether a type is bytes, or a structure that has them as `bytes`, as the Hub's data sets do."""
    if pa.types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0 and holds_files(kind.field("bytes").type)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def rows(root: str, path: str, chosen: Sequence[int]) -> Iterator[Row | DecodeError]:
    """Images of rows, in their order."""
    options: dict[str, Any] = {"pre_buffer": False, "buffer_size": BLOCK_BYTES}
    with open_file(root, path) as stream, closing(pq.ParquetFile(stream, **options)) as file:
        ends = np.cumsum([file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)])
        row_numbers = np.asarray(chosen)
        groups = np.searchsorted(ends, row_numbers, side="right")
        for group in np.unique(groups):
            requested = row_numbers[groups == group] - (int(ends[group - 1]) if group else 0)
            first = 0
            for batch in file.iter_batches(BATCH_ROWS, row_groups=[int(group)], columns=[IMAGE]):
                inside = requested[(requested >= first) & (requested < first + len(batch))] - first
                yield from map(_row, batch.column(0).take(pa.array(inside)).to_pylist())
                first += len(batch)
                if first > requested[-1]:
                    break


def _row(value: Any) -> Row | DecodeError:
    if isinstance(value, dict):
        value = value["bytes"]
    if value is None:
        return DecodeError("no image in this row")
    if isinstance(value, bytes):
        return value
    try:
        pixels = np.array(value)
    except ValueError:
        return DecodeError("rows of pixels of unequal lengths")
    shape = pixels.shape if pixels.ndim == COLOURS else (*pixels.shape, 1)
    if pixels.dtype.kind not in "iu" or len(shape) != COLOURS or 0 in shape or shape[2] not in (1, COLOURS):
        return DecodeError(f"numbers {pixels.shape} of {pixels.dtype}, not (height, width) or (height, width, 3)")
    if pixels.min() < 0 or pixels.max() > 255:  # noqa: PLR2004
        return DecodeError(f"values from {pixels.min()} to {pixels.max()}; only 0 to 255 is understood")
    return pixels.reshape(shape).astype(np.uint8)
