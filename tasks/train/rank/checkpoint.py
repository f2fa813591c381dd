"""Checkpoint files, verified before use; damaged ones are renamed.

A checkpoint is `step-00000352.ckpt` next to `step-00000352.ckpt.sha256`. The digest is written first and the file
renamed into place last, so a crash at any point leaves the older checkpoints valid. A sharded training has a directory
`step-00000352.ckpt` of such files, one from each rank; without one of them it is absent.
"""

from functools import lru_cache
from pathlib import Path

from paceline.tasks.files import sha256_of

NUM_CHECKPOINTS = 2  # newest ones that a run keeps


def checkpoint_path(directory: Path, step: int) -> Path:
    """Path of the checkpoint of a step; names sort by step."""
    return directory / f"step-{step:010d}.ckpt"


def step_of(path: Path) -> int:
    """The step after which a checkpoint was written."""
    return int(path.stem.removeprefix("step-"))


def newest_valid_checkpoint(directory: Path) -> Path | None:
    """The newest checkpoint that matches its digests, or None; damaged ones are renamed to `*.damaged`."""
    for path in sorted(directory.glob("step-*.ckpt"), reverse=True):
        if path.is_dir() and not parts_of(path):
            continue  # its ranks ended before they had written it, or they are writing it
        if verify(path):
            return path
        path.rename(path.with_suffix(".ckpt.damaged"))
    return None


def verify(path: Path) -> bool:
    """Whether the file, or all files of the directory, exist and their sha256 is the recorded one."""
    if path.is_dir():
        parts = parts_of(path)
        return bool(parts) and all(map(verify, parts))
    digest = digest_path(path)
    if not path.is_file() or not digest.is_file():
        return False
    facts = path.stat()
    return _sha256(path, facts.st_size, facts.st_mtime_ns) == digest.read_text().strip()


@lru_cache(maxsize=16)
def _sha256(path: Path, size: int, changed_at: int) -> str:
    """The digest, cached: a restart verifies the same file several times, and it may have gigabytes."""
    return sha256_of(path)


def part_path(path: Path, rank: int, world_size: int) -> Path:
    """Path of a rank's part of a sharded checkpoint."""
    return path / f"part-{rank}-of-{world_size}.pt"


def parts_of(path: Path) -> list[Path]:
    """The parts of a sharded checkpoint in the order of the ranks; empty if one is missing."""
    files = list(path.glob("part-*-of-*.pt"))
    if not files:
        return []
    num_parts = int(files[0].stem.rpartition("-")[2])
    parts = [part_path(path, rank, num_parts) for rank in range(num_parts)]
    return parts if all(part in files and digest_path(part).is_file() for part in parts) else []


def digest_path(path: Path) -> Path:
    """Path of a checkpoint's digest."""
    return path.with_name(path.name + ".sha256")
