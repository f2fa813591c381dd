"""Checkpoints that are whole or absent: atomic to write, verified before use, loaded without executing code.

A checkpoint is `step-00000352.ckpt` beside `step-00000352.ckpt.sha256`. The digest is written first and the
file renamed into place last, so a crash at any point leaves the older checkpoints valid.
"""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO

NUM_KEPT = 2


def checkpoint_path(directory: Path, step: int) -> Path:
    """Where the checkpoint of a step lies; names sort by step."""
    return directory / f"step-{step:010d}.ckpt"


def newest_verified(directory: Path) -> Path | None:
    """The newest checkpoint whose bytes match their digest, or None. Damaged ones are set aside as `*.damaged`."""
    for path in sorted(directory.glob("step-*.ckpt"), reverse=True):
        if verify(path):
            return path
        path.rename(path.with_suffix(".ckpt.damaged"))
    return None


def verify(path: Path) -> bool:
    """Whether the file is there and its sha256 is the recorded one."""
    digest = _digest_path(path)
    if not path.is_file() or not digest.is_file():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == digest.read_text().strip()


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint to the CPU; refuses anything but tensors and plain types."""
    checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return checkpoint


class AtomicCheckpointIO(CheckpointIO):
    """Lightning's checkpoint plugin with atomic writes; keeps the newest two files of a directory."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write the digest, then the file, then rename; drop what is older than the newest two."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        payload = buffer.getbuffer()
        _write_durably(_digest_path(path), hashlib.sha256(payload).hexdigest().encode())
        _write_durably(path, payload)
        self._drop_old(path.parent)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint; the caller has verified it."""
        return load(Path(path))

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove the file, then its digest."""
        Path(path).unlink(missing_ok=True)
        _digest_path(Path(path)).unlink(missing_ok=True)

    def _drop_old(self, directory: Path) -> None:
        for path in sorted(directory.glob("step-*.ckpt"))[:-NUM_KEPT]:
            self.remove_checkpoint(path)


def _digest_path(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _write_durably(path: Path, payload: bytes | memoryview) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
