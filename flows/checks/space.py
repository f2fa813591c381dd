"""Free disk space below PACELINE_HOME: what a run needs of it, and what it must leave (`limits.min_free_gib`)."""

import shutil

import psutil

from paceline.conf.config import Config
from paceline.conf.environment import Environment
from paceline.tasks.data.listing import Listing
from paceline.tasks.data.prepare.storage import MEMORY_SHARE
from paceline.tasks.data.prepare.store import directory_of
from paceline.tasks.errors import InputError, PacelineError, RunError
from paceline.tasks.files import nearest_existing
from paceline.tasks.train.rank.checkpoint import NUM_CHECKPOINTS

GIB = 2**30
MUCH_BYTES, MUCH_WIDTH = 16 * GIB, 128
"""With so many bytes to spare, the weights of a network of Paceline up to this width are not counted: it takes a
second, and their checkpoints are smaller."""
COUNTED = ("unet",)  # network whose weights grow with its depth to any number
NUM_VALUES = {"sgd": 2, "adam": 3, "adamw": 3, "muon": 3}  # values of a checkpoint per weight, with the optimizer's


def check_space(config: Config, listing: Listing, environment: Environment) -> int:
    """Check that a run would not fill the disk; return the bytes of its checkpoints. Raises InputError: it would."""
    is_prepared = any(directory_of(environment.root, key).exists() for key in listing.sizes)
    sizes = [0] if is_prepared else list(listing.sizes.values())
    # As `choose_storage` does, which also measures how fast JPEG is decoded.
    num_bytes = sizes[0] if sizes[0] <= MEMORY_SHARE * psutil.virtual_memory().total else min(sizes)
    text, spare = _usage(config, environment, {"prepared set": num_bytes})
    checkpoints = 0
    if config.model.plugin or config.model.name in COUNTED or config.model.width > MUCH_WIDTH or spare < MUCH_BYTES:
        checkpoints = _checkpoint_bytes(config, listing)
        text, spare = _usage(config, environment, {"prepared set": num_bytes, "checkpoints": checkpoints})
    if spare < 0:
        raise _refusal(InputError, text)
    return checkpoints


def require_space(config: Config, environment: Environment, checkpoints: int, *, has_run: bool = False) -> str:
    """Check the space again between two stages; return it for the log.

    Raises InputError, or RunError where the run has started: the space is missing.
    """
    text, spare = _usage(config, environment, {"checkpoints": checkpoints})
    if spare < 0:
        raise _refusal(RunError if has_run else InputError, text)
    return text


def _refusal(kind: type[PacelineError], text: str) -> PacelineError:
    return kind(text, hint="free space with: paceline clean", setting="limits.min_free_gib")


def _usage(config: Config, environment: Environment, parts: dict[str, int]) -> tuple[str, float]:
    """Free space and need as text, and the bytes to spare."""
    least, place = config.limits.min_free_gib, nearest_existing(environment.root)
    free, needed = shutil.disk_usage(place).free, sum(parts.values())
    named = ", ".join(f"{name} {num_bytes / GIB:.2f}" for name, num_bytes in parts.items())
    text = (
        f"PACELINE_HOME={environment.root} has {free / GIB:.2f} GiB free; the run needs about {needed / GIB:.2f} GiB "
        f"({named}), and limits.min_free_gib={least:g} must stay free"
    )
    return text, free - needed - least * GIB


def _checkpoint_bytes(config: Config, listing: Listing) -> int:
    """Bytes of all checkpoints at once, one of which is being written, and of two copies of the final weights."""
    from paceline.tasks.model.pretrained import blank_network  # torch: a second

    shape = (config.data.image_size, config.data.image_size, listing.channels)
    network = blank_network(config.model, shape, len(listing.class_names), len(listing.target_names))
    num_bytes: int = sum(tensor.numel() for tensor in network.state_dict().values())
    num_bytes *= 8 if config.execution.precision == "64-true" else 4
    num_values = NUM_VALUES[config.recipe.optimizer] + (config.recipe.ema is not None)
    return num_bytes * ((NUM_CHECKPOINTS + 1) * num_values + 2)
