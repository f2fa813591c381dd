"""Results of stages that are kept with a run, so that a run that goes on does not do them again.

A result names files; it counts only as long as they are what they were. Knows nothing of stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from paceline.tasks.files import sha256_of, write_durably
from paceline.tasks.records import Record

R = TypeVar("R", bound=Record)


class _Kept(Record):
    result: str
    """As JSON."""
    sums: dict[str, str]
    """sha256 of each file that it names."""


def save_result(path: Path, result: Record, files: Sequence[str]) -> None:
    """Keep a result.

    Args:
        path: Of the file to be written.
        result: What the stage returned.
        files: That it names, and without which it is worth nothing.

    Raises:
        OSError: The disk is full or cannot be written.
    """
    kept = _Kept(result=result.model_dump_json(), sums={file: sha256_of(Path(file)) for file in files})
    write_durably(path, kept.model_dump_json().encode())


def load_result(path: Path, kind: type[R], files: Sequence[str] | None = None) -> R | None:
    """A result that was kept; None if there is none, it is of another version, or a file of it is not what it was.

    Args:
        path: Of the file.
        kind: Of the result.
        files: That it must be of; None for any.
    """
    try:
        kept = _Kept.model_validate_json(path.read_bytes())
        result = kind.model_validate_json(kept.result)
        sound = all(sha256_of(Path(file)) == digest for file, digest in kept.sums.items())
    except (OSError, ValidationError):
        return None
    return result if sound and (files is None or set(files) == set(kept.sums)) else None
