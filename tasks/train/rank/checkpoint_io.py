"""Checkpoints written atomically by Lightning, and loaded without executing code."""

import hashlib
import io
import pickle
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO

from paceline.tasks.errors import RunError
from paceline.tasks.files import write_durably
from paceline.tasks.train.rank.checkpoint import digest_path

NUM_CHECKPOINTS = 2


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint to the CPU.

    Raises:
        RunError: the file holds other things than tensors and plain types. None of them was executed.
    """
    try:
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, TypeError, AttributeError, KeyError, ValueError):
        # Torch's own message advises to load it anyway.
        raise RunError(
            f"{path} is not a checkpoint of tensors and plain types; nothing of it was executed; remove it, and "
            "training resumes from the one before"
        ) from None
    return checkpoint


class AtomicCheckpointIO(CheckpointIO):
    """Lightning's checkpoint plugin with atomic writes."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write the digest, then the file, then rename; remove all but the newest two."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        payload = buffer.getbuffer()
        write_durably(digest_path(path), hashlib.sha256(payload).hexdigest().encode())
        write_durably(path, payload)
        for old in sorted(path.parent.glob("step-*.ckpt"))[:-NUM_CHECKPOINTS]:
            self.remove_checkpoint(old)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint; the caller has verified it."""
        return load(Path(path))

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove the file, then its digest."""
        Path(path).unlink(missing_ok=True)
        digest_path(Path(path)).unlink(missing_ok=True)
