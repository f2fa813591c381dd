"""Results of stages, stored with a run, so that a resumed run does not repeat the stages.

A result names files; it counts only as long as they are what they were. Knows nothing of stages.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from paceline.tasks.files import sha256_of, write_durably
from paceline.tasks.records.record import Record

R = TypeVar("R", bound=Record)


class _Kept(Record):
    result: str
    """As JSON."""
    sums: dict[str, str]
    """sha256 of each file that it names."""


def save_result(path: Path, result: Record, files: Sequence[str]) -> None:
    """Keep a result. Raises OSError: the disk is full or cannot be written."""
    cached = _Kept(result=result.model_dump_json(), sums={file: sha256_of(Path(file)) for file in files})
    write_durably(path, cached.model_dump_json().encode())


def load_result(path: Path, kind: type[R], files: Sequence[str] | None = None) -> R | None:
    """Load a stored result; None if it is missing, of another version, or one of its files has changed."""
    try:
        cached = _Kept.model_validate_json(path.read_bytes())
        result = kind.model_validate_json(cached.result)
        sound = all(sha256_of(Path(file)) == digest for file, digest in cached.sums.items())
    except (OSError, ValidationError):
        return None
    return result if sound and (files is None or set(files) == set(cached.sums)) else None
