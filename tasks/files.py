"""Files that are whole or absent, whatever crashes while they are written."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from uuid import uuid4

TEMPORARY_SUFFIX = ".tmp"


def is_full(error: BaseException) -> bool:
    """Whether the disk, or this user's share of it, is what is wanting."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def sha256_of(path: Path) -> str:
    """Hex digest of a file, by which it is known to be whole."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_durably(path: Path, content: bytes | memoryview) -> None:
    """Write a file that is in memory; see `write_pieces_durably`."""
    write_pieces_durably(path, (content,))


def write_pieces_durably(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a file under a temporary name, push it to the disk, then give it its name.

    A retried task may overlap with its first try on another worker, so the temporary name is this call's own.

    Raises:
        OSError: The disk is full or cannot be written; names the file.
    """
    temporary = path.with_name(f"{path.name}.{uuid4().hex}{TEMPORARY_SUFFIX}")
    try:
        with temporary.open("xb") as stream:
            stream.writelines(pieces)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)
        raise
