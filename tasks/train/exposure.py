"""How much of a step went into exchanging gradients while nothing was computed, as DistributedDataParallel times it."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel


def communication_fraction(model: nn.Module | None, passes_per_step: float = 1.0) -> float | None:
    """Exposed communication over forward, backward and exposed communication.

    DistributedDataParallel times its first ten steps and every hundredth one after them, from the start of the first
    bucket's all-reduce to the end of the last one; what overlaps with the backward pass is subtracted.

    Args:
        model: after training, as the strategy wrapped it.
        passes_per_step: of which it times the last, in which gradients are exchanged.

    Returns:
        A share between 0 and 1; 0 for a model that is not distributed; None when nothing was timed, as of sharded ones.
    """
    if model is not None and any(isinstance(module, FSDPModule) for module in model.modules()):
        return None
    if not isinstance(model, DistributedDataParallel):
        return 0.0
    facts: dict[str, Any] = model._get_ddp_logging_data()
    exposed = facts.get("avg_backward_comm_time", 0) - facts.get("avg_backward_compute_comm_overlap_time", 0)
    computing = facts.get("avg_forward_compute_time", 0) + facts.get("avg_backward_compute_time", 0)
    computing *= passes_per_step
    if computing <= 0:
        return None
    exposed = max(0, exposed)
    return float(exposed / (computing + exposed))
