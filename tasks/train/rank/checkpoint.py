"""Checkpoint files, verified before use; damaged ones are renamed.

A checkpoint is `step-00000352.ckpt` next to `step-00000352.ckpt.sha256`. The digest is written first and the file
renamed into place last, so a crash at any point leaves the older checkpoints valid.
"""

from functools import lru_cache
from pathlib import Path

from paceline.tasks.files import sha256_of


def checkpoint_path(directory: Path, step: int) -> Path:
    """Path of the checkpoint of a step; names sort by step."""
    return directory / f"step-{step:010d}.ckpt"


def step_of(path: Path) -> int:
    """The step after which a checkpoint was written."""
    return int(path.stem.removeprefix("step-"))


def newest_valid_checkpoint(directory: Path) -> Path | None:
    """The newest checkpoint that matches its digest, or None; damaged ones are renamed to `*.damaged`."""
    for path in sorted(directory.glob("step-*.ckpt"), reverse=True):
        if verify(path):
            return path
        path.rename(path.with_suffix(".ckpt.damaged"))
    return None


def verify(path: Path) -> bool:
    """Whether the file exists and its sha256 is the recorded one."""
    digest = digest_path(path)
    if not path.is_file() or not digest.is_file():
        return False
    facts = path.stat()
    return _sha256(path, facts.st_size, facts.st_mtime_ns) == digest.read_text().strip()


@lru_cache(maxsize=16)
def _sha256(path: Path, size: int, changed_at: int) -> str:
    """The digest, cached: a restart verifies the same file several times, and it may have gigabytes."""
    return sha256_of(path)


def digest_path(path: Path) -> Path:
    """Path of a checkpoint's digest."""
    return path.with_name(path.name + ".sha256")
