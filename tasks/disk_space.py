"""Free disk space: what a run needs of it, and what it must leave (`limits.min_free_gib`)."""

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from paceline.conf.config import Limits
from paceline.tasks.errors import InputError, PacelineError
from paceline.tasks.files import nearest_existing

GIB = 2**30


def require_space(
    limits: Limits,
    place: Path,
    parts: Mapping[str, int | None],
    kind: type[PacelineError] = InputError,
    named: str = "PACELINE_HOME",
) -> str:
    """Check that a directory has space for parts of so many bytes, None if unknown; return free space and need as text.

    Raises an error of the given kind: it would have less left than `limits.min_free_gib`.
    """
    known = [num_bytes for num_bytes in parts.values() if num_bytes is not None]
    free, needed = shutil.disk_usage(nearest_existing(place)).free, sum(known)
    sizes = ", ".join(f"{part} {_size(num_bytes)}" for part, num_bytes in parts.items())
    total = f"about {_size(needed)} GiB" if known else "space"
    need = f"the run needs {total} ({sizes}), and " if parts else ""
    text = (
        f"{named}={place} has {free / GIB:.2f} GiB free; {need}limits.min_free_gib={limits.min_free_gib:g} must stay "
        "free"
    )
    if free - needed < limits.min_free_gib * GIB:
        hint = "free space with: paceline clean"
        if named != "PACELINE_HOME":  # another disk, which holds nothing that the clean-up removes
            hint = f"delete files on the disk of {place}, or give a directory on another disk with {named} DIR"
        raise kind(text, hint=hint, setting="limits.min_free_gib")
    return text


def _size(num_bytes: int | None) -> str:
    return "of unknown size" if num_bytes is None else f"{num_bytes / GIB:.2f}"


def size_of(directory: Path) -> int:
    """Bytes of all files below a directory, without those that are removed meanwhile."""
    num_bytes = 0
    for place, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):
                num_bytes += (Path(place) / name).lstat().st_size
    return num_bytes
