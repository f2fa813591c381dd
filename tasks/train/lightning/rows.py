"""Results of a user's `predict_step` as rows of Parquet files: a row for each sample, a column for each output."""

import io
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from paceline.tasks.errors import InputError, one_line
from paceline.tasks.files import write_durably

PART_BYTES = 64 * 2**20
SHAPES = "return a tensor, a list with a value for each sample, or a dict or tuple of these, from predict_step"
SAME = "return the same names and types for each batch from predict_step"
SEPARATE = (
    'return a dict such as {"mean": mean, "variance": variance} for several columns, '
    'or [{"value": value} for value in values] for one value of each sample'
)
SCALARS = (str, bytes, int, float, np.generic, type(None))


def table_of(result: Any, num_samples: float = math.nan) -> pa.Table:
    """The rows of a batch's result.

    A dict gives a column for each key. A tuple gives a column for each of its parts, unless all are plain values:
    these are one column. Anything else is the column `prediction`. A column is a tensor or an array whose first
    dimension is the samples, or a list or tuple with a value for each sample.

    Args:
        result: what `predict_step` returned.
        num_samples: of the first tensor of the batch, with which a list or tuple of tensors or arrays must agree; NaN
            where the batch has no tensor.

    Raises InputError: it is none of these, or the columns have different numbers of samples, or two have one name.
    """
    columns: dict[str, pa.Array] = {}
    for name, values in _outputs(result):
        if name in columns:
            raise InputError(f"predict_step returned two columns {name}", hint=f"give one {name} another name")
        if _is_list_of_tensors(values) and not math.isnan(num_samples) and len(values) != num_samples:
            fault = f"{name} of predict_step is a {type(values).__name__} of {len(values)} tensors or arrays"
            fault += f", and the first tensor of the batch has {num_samples:g} samples"
            raise InputError(fault, hint=SEPARATE)
        try:
            columns[name] = _column(values)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            fault = f"{name} of predict_step cannot be written: {one_line(error)[:200]}"
            raise InputError(fault, hint=SHAPES) from error
    if not columns:
        raise InputError("predict_step returned an empty dict", hint=SHAPES)
    sizes = {name: len(column) for name, column in columns.items()}
    if len({*sizes.values()}) > 1:
        shown = ", ".join(f"{name} of {size}" for name, size in sizes.items())
        raise InputError(f"predict_step returned {shown} samples", hint="return as many values of each for a batch")
    return pa.table(columns)


def _outputs(result: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The columns by name."""
    if isinstance(result, tuple) and hasattr(result, "_asdict"):
        result = result._asdict()
    elif isinstance(result, tuple) and not name and not all(map(_is_scalar, result)):
        result = {f"prediction_{number}": part for number, part in enumerate(result)}
    if not isinstance(result, Mapping):
        yield name or "prediction", result
        return
    for key, part in result.items():
        yield from _outputs(part, f"{name}.{key}" if name else str(key))


def _is_list_of_tensors(values: Any) -> bool:
    """Whether it is a list or tuple of tensors or arrays.

    Each is the value of one sample, or has by mistake values of all samples.
    """
    is_list = isinstance(values, (list, tuple)) and bool(values)
    return is_list and all(isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim for value in values)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, SCALARS) or (isinstance(value, torch.Tensor) and not value.ndim)


def _column(values: Any) -> pa.Array:
    if isinstance(values, torch.Tensor):
        values = _array(values)
    if _is_scalar(values) or (isinstance(values, np.ndarray) and not values.ndim):
        raise ValueError(f"one value of type {type(values).__name__} for all samples of the batch")
    if isinstance(values, (list, tuple)):
        return pa.array([_plain(value) for value in values])
    if not isinstance(values, np.ndarray):
        raise TypeError(f"of type {type(values).__name__}")
    column = pa.array(values.reshape(-1))
    for axis in reversed(range(1, values.ndim)):
        ends = np.arange(np.prod(values.shape[:axis], dtype=np.int64) + 1, dtype=np.int32) * values.shape[axis]
        column = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), column)
    return column


def _array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A tensor on the host; half precision as float32, which all readers of Parquet know."""
    tensor = tensor.detach().cpu()
    return np.asarray((tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).numpy())


def _plain(value: Any) -> Any:
    """A sample's value as pyarrow reads it."""
    if isinstance(value, torch.Tensor):
        value = _array(value)
    if isinstance(value, (np.ndarray, np.generic)):
        return value if value.ndim == 1 else value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, (list, tuple)) else value


class PartWriter:
    """Writes rows into files `part-00000.parquet` and so on, each of which is complete or absent."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.num_batches = self.num_rows = self.num_parts = 0
        self.schema = pa.schema([])
        self._tables: list[pa.Table] = []

    def add(self, result: Any, num_samples: float = math.nan, **more: Any) -> None:
        """Add the result of a batch.

        Columns may come in any order. Until the first part is written, the type of a column becomes one that has the
        values of all batches, such as float for integers and floats. After that it cannot change.

        Args:
            result: what `predict_step` returned, as `table_of` describes it.
            num_samples: of the batch, or NaN.
            more: columns with one value for all samples of the batch.

        Raises InputError: it is not as `table_of` has it, or has other columns than those of the batches before.
        """
        table = table_of(result, num_samples)
        for name, value in more.items():
            if name in table.column_names:
                fault = f"the column {name} of predict_step has the name of a column of Paceline"
                raise InputError(fault, hint=f"give {name} another name")
            table = table.append_column(name, pa.array([value] * len(table)))
        if not self.num_batches:
            self.schema = table.schema
        try:
            if {*table.column_names} != {*self.schema.names}:
                raise ValueError(f"it has the columns {', '.join(table.column_names)}")
            table = table.select(self.schema.names)
            # Of the first batch perhaps all values are None.
            schema = pa.unify_schemas([self.schema, table.schema], promote_options="permissive")
            if self.num_parts and schema != self.schema:  # a cast would round values, or leave out fields
                name = next(name for name in schema.names if schema.field(name) != self.schema.field(name))
                raise ValueError(f"{name} is of type {table.schema.field(name).type} now")
            self.schema, table = schema, table.cast(schema)
        except (pa.ArrowException, ValueError) as error:
            before = ", ".join(f"{field.name} ({field.type})" for field in self.schema)
            fault = f"batch {self.num_batches} of predict_step differs from those before"
            raise InputError(f"{fault}, which have {before}: {one_line(error)}", hint=SAME) from error
        self.num_batches, self.num_rows = self.num_batches + 1, self.num_rows + len(table)
        self._tables.append(table)
        if sum(table.nbytes for table in self._tables) >= PART_BYTES:
            self.write()

    def write(self) -> None:
        """Write the rows since the last part, if there are any.

        Raises InputError: a value does not fit the type of its column, such as a large integer among floats.
        """
        if not any(map(len, self._tables)):
            return
        buffer = io.BytesIO()
        try:
            rows = pa.concat_tables([table.cast(self.schema) for table in self._tables])
        except pa.ArrowException as error:  # such as integers that no float is equal to
            fault = "a value of predict_step does not fit the type that its column has by the other batches"
            raise InputError(f"{fault}: {one_line(error)}", hint=SAME) from error
        pq.write_table(rows, buffer, compression="zstd")
        write_durably(self._directory / f"part-{self.num_parts:05d}.parquet", buffer.getbuffer())
        self.num_parts, self._tables = self.num_parts + 1, []
