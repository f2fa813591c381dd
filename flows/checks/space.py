"""Space below PACELINE_HOME that a run needs, and the trainings that a study or a sweep has still to run."""

import shutil
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import psutil

from paceline.conf.config import Config
from paceline.conf.environment import Environment
from paceline.tasks.data.listing import Listing
from paceline.tasks.data.prepare.storage import MEMORY_SHARE
from paceline.tasks.data.prepare.store import directory_of
from paceline.tasks.disk_space import GIB, require_space, size_of
from paceline.tasks.errors import RunError
from paceline.tasks.files import nearest_existing
from paceline.tasks.train.rank.checkpoint import NUM_CHECKPOINTS

MUCH_BYTES, MUCH_WIDTH = 16 * GIB, 128
"""With so many bytes to spare, the weights of a network of Paceline up to this width are not counted: it takes a
second, and their checkpoints are smaller."""
COUNTED = ("unet",)  # network whose weights grow with its depth to any number
NUM_VALUES = {"sgd": 2, "adam": 3, "adamw": 3, "muon": 3}  # values of a checkpoint per weight, with the optimizer's


class CheckpointBytes(NamedTuple):
    """Bytes of a run's checkpoints; 0 where they are small and were not counted."""

    kept: int = 0  # with two copies of the final weights
    written: int = 0  # of one more, while it is being written


def check_space(config: Config, listing: Listing, environment: Environment) -> CheckpointBytes:
    """Check that a run would not fill the disk; return the bytes of its checkpoints. Raises InputError: it would."""
    checkpoint_bytes = CheckpointBytes()
    sizes = [0] if is_prepared(listing, environment) else list(listing.sizes.values())
    # As `choose_storage` does, which also measures how fast JPEG is decoded.
    num_bytes = sizes[0] if sizes[0] <= MEMORY_SHARE * psutil.virtual_memory().total else min(sizes)
    parts, must_stay = {"prepared set": num_bytes}, config.limits.min_free_gib * GIB
    spare = shutil.disk_usage(nearest_existing(environment.root)).free - num_bytes - must_stay
    if config.model.plugin or config.model.name in COUNTED or config.model.width > MUCH_WIDTH or spare < MUCH_BYTES:
        checkpoint_bytes = _checkpoint_bytes(config, listing)
        parts["checkpoints"] = sum(checkpoint_bytes)
    require_space(config.limits, environment.root, parts)
    return checkpoint_bytes


def is_prepared(listing: Listing, environment: Environment) -> bool:
    """Whether the data have been prepared, at any size."""
    return any(directory_of(environment.root, key).exists() for key in listing.sizes)


def require_space_for_rest(
    config: Config, environment: Environment, rest: Iterable[tuple[Sequence[str | None], int]]
) -> None:
    """Check the space for further trainings, given as ids of similar runs that have ended, and how many are left.

    Each is as large as the mean of those runs, and of unknown size without one. Raises RunError: it is missing.
    """
    number = num_bytes = num_unknown = 0
    for run_ids, left in rest:
        if sizes := [size_of(environment.root / "runs" / run_id) for run_id in run_ids if run_id is not None]:
            number += left
            num_bytes += left * sum(sizes) // len(sizes)
        else:
            num_unknown += left
    parts: dict[str, int | None] = {f"{number} further trainings": num_bytes} if number else {}
    if num_unknown:
        name = f"{num_unknown} further trainings"
        parts[f"another {name}" if name in parts else name] = None
    if parts:  # after the last one only the report is left, which is small
        require_space(config.limits, environment.root, parts, RunError)


def _checkpoint_bytes(config: Config, listing: Listing) -> CheckpointBytes:
    from paceline.tasks.model.pretrained import blank_network  # torch: a second

    shape = (config.data.image_size, config.data.image_size, listing.channels)
    network = blank_network(config.model, shape, len(listing.class_names), len(listing.target_names))
    num_bytes: int = sum(tensor.numel() for tensor in network.state_dict().values())
    num_bytes *= 8 if config.execution.precision == "64-true" else 4
    num_values = NUM_VALUES[config.recipe.optimizer] + (config.recipe.ema is not None)
    return CheckpointBytes(num_bytes * (NUM_CHECKPOINTS * num_values + 2), num_bytes * num_values)
