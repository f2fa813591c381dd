"""What a group does when a pass does not fit into a device's memory: it goes on with half as many samples at once.

It begins again from its newest checkpoint, as after any loss: fresh processes have all of the device's memory, and no
rank is left waiting for another in the middle of a step. What was found is kept with the run, so that one that is
resumed takes the same passes. Pure but for that file; knows nothing of ranks.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from paceline.conf.config import Config
from paceline.tasks.errors import RankError
from paceline.tasks.files import write_durably
from paceline.tasks.records import Choice, Plan

FITTING_FILE = "micro_batch.json"
"""In the run's directory."""


def with_smaller_micro_batch(plan: Plan, config: Config, error: RankError) -> Plan | None:
    """The plan with passes of half as many samples as did not fit; None where that is not why a rank failed.

    Args:
        plan: of the attempt that failed.
        config: of the run.
        error: by which it did.

    Raises:
        RankError: `error`, with what to do, where the passes cannot become smaller.
    """
    num = error.too_many
    if num is None:
        return None
    remedy = _remedy(config, num)
    if remedy is not None:
        raise RankError(f"{error}; {remedy}", error.rank, error.rank_traceback, final=True) from error
    fitting = -(-num // 2)
    reason = f"{num} samples at once did not fit into the memory of {plan.device_name}"
    return _with(plan, Choice(value=fitting, reason=reason))


def _remedy(config: Config, num: int) -> str | None:
    """What the user can do where nothing is done for him; None where something is."""
    asked = config.execution.micro_batch
    if num == 1:
        return "one sample alone does not fit; use a smaller data.image_size, model.width or model.depth, or bf16-mixed"
    if config.execution.strategy == "fsdp":
        return "use a smaller recipe.batch_size or more devices; execution.strategy=fsdp takes no micro-batches"
    if asked != "auto":
        return f"execution.micro_batch={asked} leaves it at that; use execution.micro_batch=auto, or {-(-num // 2)}"
    return None


def save_micro_batch(directory: Path, plan: Plan) -> None:
    """Keep what was found with the run.

    Raises:
        OSError: it cannot be written.
    """
    write_durably(directory / FITTING_FILE, plan.reasons["micro_batch"].model_dump_json().encode())


def restore_micro_batch(directory: Path, plan: Plan, config: Config) -> Plan:
    """The plan with what an earlier attempt of the run has found, where that is left open."""
    if config.execution.micro_batch == "auto":
        with suppress(OSError, ValidationError):
            return _with(plan, Choice.model_validate_json((directory / FITTING_FILE).read_bytes()))
    return plan


def _with(plan: Plan, choice: Choice) -> Plan:
    update = {"micro_batch": int(choice.value), "reasons": plan.reasons | {"micro_batch": choice}}
    return plan.model_copy(update=update)
