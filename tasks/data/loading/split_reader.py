"""Opens a split of a prepared set, after a check that its files are those of its manifest."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.tasks.data.listing import SplitName
from paceline.tasks.data.loading.photo_split import PhotoSplit
from paceline.tasks.data.prepare import manifest
from paceline.tasks.data.prepare.shard import Shard
from paceline.tasks.data.split import Split
from paceline.tasks.errors import RunError, one_line
from paceline.tasks.records.data import PreparedSet


def open_split(prepared: PreparedSet, split: SplitName) -> Split:
    """Open one split of a prepared set; RunError if the set does not match its manifest."""
    path = Path(prepared.path)
    try:
        facts = manifest.read(path)
    except manifest.DamagedError as error:
        raise RunError(f"prepared set {path}: {error}; run again to prepare it again") from error

    def load(kind: str, dtype: type[np.generic], shape: tuple[int, ...] | None) -> list[Any]:
        return [_load(path, shard, kind, dtype, shape) for shard in facts.of_split(split)]

    num_targets = len(facts.target_names)
    no_targets = np.empty((0, num_targets), dtype=np.float32)
    try:
        labels_N = np.concatenate([np.empty(0, dtype=np.int64), *load("labels", np.int64, ())])
        if labels_N.size and not 0 <= labels_N.min() <= labels_N.max() < len(facts.class_names):
            raise manifest.DamagedError(f"a label of {split} is outside of its {len(facts.class_names)} classes")
        images = load("images", np.uint8, facts.image_shape if facts.has_squares else None)
        targets = [no_targets, *load("targets", np.float32, (num_targets,))] if num_targets else []
        if facts.has_squares:
            return Split(split, images, labels_N, np.concatenate(targets) if targets else None, facts.image_shape)
        shapes = load("shapes", np.int64, (3,))
        return PhotoSplit(split, images, labels_N, None, facts.image_shape, shapes, facts.storage, facts.stored_size)
    except manifest.DamagedError as error:
        raise RunError(f"prepared set {path}: {error}; remove the set and run again to prepare it") from error


def _load(
    path: Path, shard: Shard, kind: str, dtype: type[np.generic], shape: tuple[int, ...] | None
) -> npt.NDArray[Any]:
    """The array of a shard: a row of this shape for each sample, or any number of bytes."""
    file = shard.file(kind)
    if file is None:
        raise manifest.DamagedError(f"shard {shard.number} of {shard.split} has no {kind}")
    try:
        array: npt.NDArray[Any] = np.load(path / file.name, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise manifest.DamagedError(f"{file.name} is not an array of numbers ({one_line(error)[:200]})") from error
    expected = (array.size,) if shape is None else (shard.num_samples, *shape)
    if array.dtype != dtype or array.shape != expected:
        raise manifest.DamagedError(f"{file.name} holds {array.dtype} {array.shape}, not {np.dtype(dtype)} {expected}")
    return array
