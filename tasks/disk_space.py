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
    parts: Mapping[str, int],
    kind: type[PacelineError] = InputError,
    named: str = "PACELINE_HOME",
) -> str:
    """Check that a directory has space for parts of so many bytes; return free space and need as text.

    Raises an error of the given kind: it would have less left than `limits.min_free_gib`.
    """
    free, needed = shutil.disk_usage(nearest_existing(place)).free, sum(parts.values())
    sizes = ", ".join(f"{part} {num_bytes / GIB:.2f}" for part, num_bytes in parts.items())
    need = f"the run needs about {needed / GIB:.2f} GiB ({sizes}), and " if parts else ""
    text = (
        f"{named}={place} has {free / GIB:.2f} GiB free; {need}limits.min_free_gib={limits.min_free_gib:g} must stay "
        "free"
    )
    if free - needed < limits.min_free_gib * GIB:
        raise kind(text, hint="free space with: paceline clean", setting="limits.min_free_gib")
    return text


def size_of(directory: Path) -> int:
    """Bytes of all files below a directory, without those that are removed meanwhile."""
    num_bytes = 0
    for place, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):
                num_bytes += (Path(place) / name).lstat().st_size
    return num_bytes
