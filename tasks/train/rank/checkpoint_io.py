"""Checkpoints written atomically by Lightning, and loaded without executing code."""

import hashlib
import io
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO

from paceline.tasks.errors import RunError
from paceline.tasks.files import write_durably
from paceline.tasks.train.rank.checkpoint import digest_path, parts_of

NUM_CHECKPOINTS = 2
Place = tuple[Any, ...]
"""Keys that lead to a value inside a checkpoint."""
Rows = dict[Place, tuple[int, int, torch.Tensor]]
"""For each sharded tensor: first row in the tensor, number of all rows, and a part's rows."""


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


def join(path: Path, wrap: Callable[[Callable[[int, int], torch.Tensor], int], torch.Tensor]) -> dict[str, Any]:
    """Read a sharded checkpoint; `wrap` makes each tensor from a function of (first row, stop) and its number of rows.

    Raises:
        RunError: a part holds other things than tensors and plain types.
    """
    parts = [load(part) for part in parts_of(path)]
    checkpoint: dict[str, Any] = parts[0]["rest"]
    for place, (_, num_rows, _) in parts[0]["rows"].items():
        pieces = [part["rows"][place] for part in parts]

        def read(start: int, stop: int, pieces: list[tuple[int, int, torch.Tensor]] = pieces) -> torch.Tensor:
            return torch.cat([rows[max(0, start - first) : max(0, stop - first)] for first, _, rows in pieces])

        *parents, name = place
        holder: Any = checkpoint
        for key in parents:
            holder = holder[key]
        holder[name] = wrap(read, num_rows)
    return checkpoint


def load_full(path: Path) -> dict[str, Any]:
    """Read a checkpoint with all its rows, sharded or not."""
    return join(path, lambda read, num_rows: read(0, num_rows)) if path.is_dir() else load(path)


def load_rest(path: Path) -> dict[str, Any]:
    """Read what of a checkpoint is not sharded."""
    unsharded: dict[str, Any] = load(parts_of(path)[0])["rest"] if path.is_dir() else load(path)
    return unsharded


class AtomicCheckpointIO(CheckpointIO):
    """Lightning's checkpoint plugin with atomic writes."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write the digest, then the file, then rename; remove all but the newest two."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():  # what a sharded training left that resumes on one rank
            remove(path)
        write_with_digest(path, checkpoint)
        prune(path.parent)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint; the caller has verified it."""
        return load_full(Path(path))

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove the file or the directory."""
        remove(Path(path))


def write_with_digest(path: Path, content: dict[str, Any]) -> None:
    """Write the digest, then the file, then rename."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    payload = buffer.getbuffer()
    write_durably(digest_path(path), hashlib.sha256(payload).hexdigest().encode())
    write_durably(path, payload)


def prune(directory: Path) -> None:
    """Remove all but the newest two checkpoints, and what crashes have left of others; no rank may be writing one."""
    paths = sorted(directory.glob("step-*.ckpt"))
    complete = [path for path in paths if not path.is_dir() or parts_of(path)]
    for old in set(paths) - set(complete[-NUM_CHECKPOINTS:]):
        remove(old)


def remove(path: Path) -> None:
    """Remove a checkpoint: the directory, or the file and then its digest."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    digest_path(path).unlink(missing_ok=True)
