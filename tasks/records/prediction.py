"""Records of a prediction with own Lightning code."""

from __future__ import annotations

from typing import Any

from paceline.conf.execution import Precision
from paceline.tasks.records.data import PreparedPartitions
from paceline.tasks.records.record import Record


class ModulePrediction(Record):
    """What a process predicts."""

    settings: dict[str, Any]  # of the classes, as LightningCLI reads them
    code: str | None  # directory that is imported from first; None for installed packages
    packages: tuple[str, ...]
    partitions: PreparedPartitions | None = None  # what the DataModule has prepared; None for nothing
    checkpoint: str | None  # of Lightning's; None for the weights of a model
    model_directory: str | None
    model_digest: str | None
    precision: Precision
    gpu: bool
    num_threads: int
    directory: str  # of the process, seen by the worker
    out: str  # directory for the Parquet files


class ModulePredicted(Record):
    """What it has predicted."""

    num_samples: int  # rows
    num_batches: int
    seconds: float  # from the request for the first batch until the last row was written
    columns: dict[str, str]  # types by name
    refused: tuple[str, str | None] | None = None  # fault and hint of wrong input, where nothing was predicted
