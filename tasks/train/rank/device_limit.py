"""Cost of a training step, and the limit of the device: taken after the training, which they cannot disturb then."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from paceline.conf.execution import COMPILED, Precision
from paceline.conf.recipe import Recipe
from paceline.tasks.errors import one_line
from paceline.tasks.measure.device_limit import COPY_BYTES, limit_cache, measure_limit
from paceline.tasks.measure.validity import ValidityWatch
from paceline.tasks.model.flops import count_cost
from paceline.tasks.model.out_of_memory import is_out_of_memory
from paceline.tasks.model.threads import use_threads
from paceline.tasks.model.transfer import freeze
from paceline.tasks.records.cost import Cost
from paceline.tasks.records.execution import Plan
from paceline.tasks.records.hardware import DeviceLimit
from paceline.tasks.train.rank.context import RankContext
from paceline.tasks.train.rank_spec import RankSpec

ACTIVATION_BYTES: dict[Precision, int] = {"64-true": 8, "bf16-mixed": 2, "16-mixed": 2}
"""Least bytes of a stored value; 4 with other precisions."""
STATE_VALUES = {"sgd": 1, "adam": 2, "adamw": 2, "muon": 1}  # values of an optimizer's state per parameter, at least
CACHED_BYTES = 2 * COPY_BYTES  # a step with less traffic than the measured copy may find its tensors in a cache


def limit_facts(context: RankContext) -> dict[str, Any]:
    """Fields of the result from which the share of the limit follows; rank 0's alone."""
    if not context.writes:
        return {}
    if context.config.recipe.progressive_size is not None and context.config.speedup.baseline != "probe":
        return {"uncounted": "recipe.progressive_size changes the size of a step, and no probe timed the full size"}
    network = context.new_network()
    if context.config.model.freeze != "none":
        freeze(network, context.config.model.freeze)
    cost, reason = count_cost(network, context.prepared.picture_shape)
    if cost is None:
        return {"uncounted": reason}
    batches = context.batches
    num_samples = max(1, min(batches.global_batch_size, batches.num_samples) // batches.world_size)
    num_bytes = bytes_per_sample(cost, context.spec.plan, context.config.recipe, num_samples)
    facts: dict[str, Any] = {"cost": cost, "bytes_per_sample": num_bytes}
    return facts | known_limit(
        context.spec, context.device, lambda: ValidityWatch(context.own_processes(), gpu_uuids=context.gpu_uuids())
    )


def known_limit(spec: RankSpec, device: torch.device, watch: Callable[[], ValidityWatch]) -> dict[str, Any]:
    """The limit as a field of the result, or why it is not known; a measurement starts the watch."""
    try:
        return {"limit": _find_limit(spec, device, watch)}
    except RuntimeError as error:  # the training has succeeded, whatever the device says now
        reason = "no memory was left" if is_out_of_memory(error) else one_line(error)
        return {"uncounted": f"the device's limit could not be measured: {reason}"}


def bytes_per_sample(cost: Cost, plan: Plan, recipe: Recipe, num_samples: int) -> float | None:
    """Lower bound of the bytes that a step of one device moves through its memory, per sample of the step.

    A step of `num_samples` reads each parameter, writes each gradient and reads it, reads and writes each trained
    parameter and each value of the optimizer's state, and writes and reads each value that is stored for the backward
    pass.

    Returns None for a step so small that its tensors may stay in a cache, and where the stored values or the place of
    the state are not known: compiled networks and sharded ones.
    """
    if plan.compile in COMPILED or plan.strategy == "fsdp":
        return None
    num_state = 0 if recipe.optimizer == "sgd" and not recipe.momentum else STATE_VALUES[recipe.optimizer]
    weight_bytes = 8 if plan.precision == "64-true" else 4
    weights = weight_bytes * (cost.num_parameters + (2 + 2 + 2 * num_state) * cost.num_trained)
    stored = cost.saved_values * ACTIVATION_BYTES.get(plan.precision, 4) + cost.saved_bytes
    total = weights + 2 * stored * num_samples
    return total / num_samples if total >= CACHED_BYTES else None


def _find_limit(spec: RankSpec, device: torch.device, watch: Callable[[], ValidityWatch]) -> DeviceLimit:
    """The limit from the cache, or measured now; a disturbed measurement serves this run alone.

    Raises RuntimeError: the device fails, or other trainings may use it.
    """
    precision = spec.plan.precision
    use_threads(spec.plan.num_threads)
    cache = limit_cache(Path(spec.home), device)
    if (known := cache.find()) is not None and precision in known.flops_per_second:
        return known
    if not spec.may_measure_limit:
        raise RuntimeError("other trainings may use the host")
    watching = watch()
    limit = measure_limit(device, [precision])
    limit = limit.model_copy(update={"contaminated": watching.stop().contaminated})
    if not limit.contaminated:
        with suppress(OSError):  # a full disk: the next run measures again
            cache.keep(limit)
    return limit
