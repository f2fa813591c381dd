"""Paths that may not exist yet. Pure questions to the file system; creates nothing."""

from __future__ import annotations

from pathlib import Path


def nearest_existing(path: Path) -> Path:
    """The path itself where it exists, else its nearest ancestor that does: where creating it would begin."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
