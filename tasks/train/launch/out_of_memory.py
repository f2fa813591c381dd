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

FITTING_FILE = "micro_batch.json"  # file in the run's directory


def with_smaller_micro_batch(plan: Plan, config: Config, error: RankError) -> Plan | None:
    """The plan with half of the micro-batch that did not fit; None where `error` has another cause.

    Raises:
        RankError: `error` with advice, where the micro-batch cannot become smaller.
    """
    num = error.too_many
    if num is None:
        return None
    advice = _advice(config, num)
    if advice is not None:
        raise RankError(f"{error}; {advice}", error.rank, error.rank_traceback, final=True) from error
    fitting = -(-num // 2)
    reason = f"{num} samples at once did not fit into the memory of {plan.device_name}"
    return _with(plan, Choice(value=fitting, reason=reason))


def _advice(config: Config, num: int) -> str | None:
    """Advice for the user when the micro-batch cannot be halved automatically; None if it can."""
    micro_batch = config.execution.micro_batch
    if num == 1:
        return "one sample alone does not fit; use a smaller data.image_size, model.width or model.depth, or bf16-mixed"
    if config.execution.strategy == "fsdp":
        return "use a smaller recipe.batch_size or more devices; execution.strategy=fsdp takes no micro-batches"
    if micro_batch != "auto":
        return f"execution.micro_batch={micro_batch} is fixed; use execution.micro_batch=auto, or {-(-num // 2)}"
    return None


def with_streaming(plan: Plan, error: RankError) -> Plan:
    """The plan that streams the set, whose resident copy did not fit.

    Raises:
        RankError: `error` with advice, where the loading is fixed or streams already.
    """
    if plan.loading != "resident" or "loading" not in plan.reasons:
        advice = "use execution.loading=streaming, or a smaller recipe.batch_size"
        raise RankError(f"{error}; {advice}", error.rank, error.rank_traceback, final=True) from error
    choice = Choice(value="streaming", reason=f"the set did not fit into the memory of {plan.device_name}")
    return plan.model_copy(update={"loading": "streaming", "reasons": plan.reasons | {"loading": choice}})


def save_micro_batch(directory: Path, plan: Plan) -> None:
    """Save the plan's micro-batch with the run."""
    write_durably(directory / FITTING_FILE, plan.reasons["micro_batch"].model_dump_json().encode())


def restore_micro_batch(directory: Path, plan: Plan, config: Config) -> Plan:
    """The plan with the micro-batch of an earlier attempt, where the configuration leaves it open."""
    if config.execution.micro_batch == "auto":
        with suppress(OSError, ValidationError):
            return _with(plan, Choice.model_validate_json((directory / FITTING_FILE).read_bytes()))
    return plan


def _with(plan: Plan, choice: Choice) -> Plan:
    update = {"micro_batch": int(choice.value), "reasons": plan.reasons | {"micro_batch": choice}}
    return plan.model_copy(update=update)
