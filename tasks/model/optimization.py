"""The loss of a batch, the optimizer that lowers it, and the average of the weights."""

import math

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from paceline.conf.recipe import Recipe
from paceline.tasks.model.batch import Batch
from paceline.tasks.model.muon import Muon
from paceline.tasks.model.objectives import Task
from paceline.tasks.model.transfer import parameter_groups

_MARK = "_dynamo_weak_dynamic_indices"
"""What `maybe_mark_dynamic` leaves at a tensor of a compiled step; what is made of it needs its own."""


def batch_loss(network: nn.Module, batch: Batch, recipe: Recipe, task: Task) -> torch.Tensor:
    """Scalar loss of a batch in a task, times its weight (see `Batch.weight`)."""
    inputs_NCHW = task.inputs(batch)
    if hasattr(batch.images_NCHW, _MARK) and inputs_NCHW is not batch.images_NCHW:
        torch._dynamo.maybe_mark_dynamic(inputs_NCHW, 0)
    return task.loss(network(inputs_NCHW), batch, recipe) * batch.weight


def build_optimizer(network: nn.Module, recipe: Recipe, learning_rate: float) -> torch.optim.Optimizer:
    """The recipe's optimizer over all trained parameters of the network, updated in one pass where torch can."""
    decay = recipe.weight_decay
    if recipe.optimizer == "muon":
        return Muon(network, learning_rate, recipe.momentum, decay, fused=True)
    groups = parameter_groups(network, recipe, learning_rate)
    if recipe.optimizer == "sgd":
        flags = _update_flags(network, torch.optim.SGD)
        return torch.optim.SGD(groups, learning_rate, recipe.momentum, weight_decay=decay, **flags)
    kind = torch.optim.AdamW if recipe.optimizer == "adamw" else torch.optim.Adam
    flags = _update_flags(network, kind)
    return kind(groups, learning_rate, weight_decay=decay, fused=flags["fused"], foreach=flags["foreach"])


def prepare_optimizer_state(optimizer: torch.optim.Optimizer, network: nn.Module, *, is_captured: bool = False) -> None:
    """Fit an optimizer, with the state that was restored if any, to the network as it is executed now.

    A checkpoint brings the flags and the memory layout of the execution that wrote it, and fused kernels on CPUs go
    through weights, gradients and momenta by address, whatever their strides say (torch 2.13). A CUDA graph
    (`is_captured`) reads the learning rate on the device, because it changes in each step.
    """
    for group in optimizer.param_groups:
        group.update(_update_flags(network, type(optimizer)))
        rate = float(group["lr"])
        group["lr"] = torch.tensor(rate, device=group["params"][0].device) if is_captured else rate
        if "capturable" in group:
            group["capturable"] = is_captured
        for weight in group["params"] if group["fused"] else ():
            state = optimizer.state[weight]
            for name, value in state.items():
                if isinstance(value, torch.Tensor):  # a count of steps, or shaped like the weight
                    is_shaped = value.shape == weight.shape
                    state[name] = torch.empty_like(weight).copy_(value) if is_shaped else value.to(weight.device)


def _update_flags(network: nn.Module, kind: type[torch.optim.Optimizer]) -> dict[str, bool]:
    """How torch updates the weights in the fewest launches: for sharded ones, torch 2.13 has no fused SGD."""
    fused = not (isinstance(network, FSDPModule) and issubclass(kind, torch.optim.SGD))
    return {"fused": fused, "foreach": not fused}


def learning_rate_factor(recipe: Recipe, step: float, steps_per_epoch: int) -> float:
    """Factor on the peak learning rate at a step (0-based), between 0 and 1.

    The step is between two steps where steps before it were of another size. Linear warm-up as in Goyal et al. (2017);
    one-cycle as in Smith (2018): linear up, linear down to zero.
    """
    total = recipe.num_epochs * steps_per_epoch
    warmup = min(recipe.warmup_epochs, recipe.num_epochs / 2) * steps_per_epoch  # a short trial of a long recipe
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if recipe.schedule == "piecewise":
        return float(recipe.drop_factor ** (step // (recipe.drop_epochs * steps_per_epoch)))
    if recipe.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1.0, total - warmup))
    if recipe.schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0 - progress


class WeightAverage:
    """Exponential moving average of a network's trained weights and floating-point buffers; sharded where that is.

    The sum starts at zero and is divided by the weight of all its terms, so that the initial weights have no part in
    the average: sum / (1 - decay^steps), the bias correction of Kingma and Ba, "Adam" (2015). A step costs one pass
    over the weights and reads nothing on the host, also in a CUDA graph.

    Create it once the network is where it is trained: it reads the weights in place. `decay` is per step, between 0 and
    1; `sums` are those of an earlier process, by the names of the weights.
    """

    def __init__(self, network: nn.Module, decay: float, sums: dict[str, torch.Tensor] | None = None) -> None:
        frozen = {name for name, weight in network.named_parameters() if not weight.requires_grad}
        state = network.state_dict().items()
        weights = {name: value for name, value in state if value.is_floating_point() and name not in frozen}
        self._decay = decay
        self.sums = {name: torch.zeros_like(value) for name, value in weights.items()}
        for name, saved in (sums or {}).items():
            total, value = self.sums[name], saved
            if isinstance(total, DTensor) and not isinstance(saved, DTensor):  # one rank was there before
                local = saved.to(total.device)
                value = distribute_tensor(local, total.device_mesh, total.placements, src_data_rank=None)
            total.copy_(value)
        self.buffers = [self.sums[name] for name, _ in network.named_buffers() if name in self.sums]
        """Sums of the buffers, which differ from rank to rank."""
        self._local_sums = [_local(value) for value in self.sums.values()]
        self._local_weights = [_local(value) for value in weights.values()]

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights after a step into the average."""
        torch._foreach_lerp_(self._local_sums, self._local_weights, 1.0 - self._decay)

    @torch.no_grad()
    def load_into(self, network: nn.Module, num_steps: int) -> None:
        """Load the average after `num_steps` steps into an unsharded network; collective where weights are sharded."""
        total = 1.0 - self._decay**num_steps
        weights = network.state_dict()
        for name, value in self.sums.items():
            full = value.full_tensor() if isinstance(value, DTensor) else value
            weights[name].copy_(full / total)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
