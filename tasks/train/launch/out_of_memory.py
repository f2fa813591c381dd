"""Out of memory: the next attempt of a training takes half the micro-batch, or streams a set that does not fit.

It restarts from the newest checkpoint: fresh processes have all of the device's memory, and no rank waits for another
in the middle of a step. The micro-batch is saved with the run, so that a resumed run uses the same one.
"""

from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from paceline.conf.config import Config
from paceline.tasks.errors import RankError
from paceline.tasks.files import write_durably
from paceline.tasks.records.execution import Plan
from paceline.tasks.records.record import Choice
from paceline.tasks.train.plan import with_changes

FITTING_FILE = "micro_batch.json"  # file in the run's directory


def with_advice(error: RankError, advice: str) -> RankError:
    """The error as one that restarts cannot help, with advice for the user."""
    return RankError(f"{error}; {advice}", error.rank, error.rank_traceback, final=True)


def with_smaller_micro_batch(plan: Plan, config: Config, error: RankError) -> Plan | None:
    """The plan with half of the micro-batch that failed; None for other errors. Raises RankError: it has no half."""
    num, micro_batch = error.too_many, config.execution.micro_batch
    if num is None:
        return None
    half = -(-num // 2)
    advice = None
    if num == 1:
        smaller = "use a smaller data.image_size, model.width or model.depth, or bf16-mixed"
        advice = f"one sample alone does not fit; {smaller}"
    elif config.execution.strategy == "fsdp":
        advice = "use a smaller recipe.batch_size or more devices; execution.strategy=fsdp takes no micro-batches"
    elif micro_batch != "auto":
        advice = f"execution.micro_batch={micro_batch} is fixed; use execution.micro_batch=auto, or {half}"
    if advice is not None:
        raise with_advice(error, advice) from error
    reason = f"{num} samples at once did not fit into the memory of {plan.device_name}"
    return with_changes(plan, {"micro_batch": half}, reason)


def with_streaming(plan: Plan, error: RankError) -> Plan:
    """The plan that streams the set, which did not fit. Raises RankError: the loading is fixed, or streams already."""
    if plan.loading != "resident" or "loading" not in plan.reasons:
        raise with_advice(error, "use execution.loading=streaming, or a smaller recipe.batch_size") from error
    return with_changes(plan, {"loading": "streaming"}, f"the set did not fit into the memory of {plan.device_name}")


def save_micro_batch(directory: Path, plan: Plan) -> None:
    """Save the plan's micro-batch with the run."""
    write_durably(directory / FITTING_FILE, plan.reasons["micro_batch"].model_dump_json().encode())


def restore_micro_batch(directory: Path, plan: Plan, config: Config) -> Plan:
    """The plan with the micro-batch of an earlier attempt, where the configuration leaves it open."""
    if config.execution.micro_batch == "auto":
        with suppress(OSError, ValidationError):
            choice = Choice.model_validate_json((directory / FITTING_FILE).read_bytes())
            return with_changes(plan, {"micro_batch": int(choice.value)}, choice.reason)
    return plan
