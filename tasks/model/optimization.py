"""The loss of a batch and the optimizer that lowers it. Plain functions over tensors.

Shapes: N samples, T regression targets.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from conf.recipe import Recipe
from tasks.model.muon import Muon
from tasks.model.transfer import parameter_groups

if TYPE_CHECKING:
    from tasks.model.objectives import Task


_MARK = "_dynamo_weak_dynamic_indices"
"""What `maybe_mark_dynamic` leaves at a tensor of a compiled step; what is made of it needs its own."""


class LabelledBatch(Protocol):
    """What a loader yields."""

    @property
    def images_NCHW(self) -> torch.Tensor:
        """Normalised float32 images on the device."""

    @property
    def labels_N(self) -> torch.Tensor:
        """Class indices, int64."""

    @property
    def targets_NT(self) -> torch.Tensor | None:
        """Regression targets, float32, or None."""

    @property
    def draws_N(self) -> torch.Tensor | None:
        """int64: what is added at random follows from them; None where nothing is."""

    @property
    def weight(self) -> float:
        """n_local * world_size / n_global."""

    @property
    def others_N(self) -> torch.Tensor | None:
        """Classes of images that are mixed in, int64, or None."""

    @property
    def shares_N(self) -> torch.Tensor | None:
        """How much of each image is of its own class, float32, or None for all."""


class Course(Protocol):
    """The steps of a training laid over its epochs; steps are counted over all of them."""

    @property
    def steps_per_epoch(self) -> int:
        """Of a whole epoch."""

    @property
    def num_passed(self) -> int:
        """Of `steps_per_epoch`, those that are behind this group where it takes up; all of them at an epoch's end."""

    def done(self, step: int) -> tuple[int, int]:
        """What has been seen when so many steps are done: whole epochs, and samples of the next one."""

    def samples(self, step: int) -> int:
        """How many samples have been seen when so many steps are done, over all epochs."""

    def ends_epoch(self, step: int) -> bool:
        """Whether an epoch is over when so many steps are done."""

    def epoch_end(self, step: int) -> int:
        """The first step from this one on after which an epoch is over."""

    def num_steps(self, num_epochs: int) -> int:
        """Of a training of so many epochs."""

    def even_step(self, step: int) -> float:
        """Which step this would be if all before it had been of this group's batch size; what schedules go by."""


class BatchSource(Protocol):
    """What feeds a training: sized in steps per epoch, positioned by global step."""

    def __len__(self) -> int:
        """Steps per epoch."""

    def __iter__(self) -> Iterator[LabelledBatch]:
        """Batches from the position to the end of its epoch."""

    def seek(self, step: int) -> None:
        """Go to a global step."""


def batch_loss(network: nn.Module, batch: LabelledBatch, recipe: Recipe, task: Task) -> torch.Tensor:
    """Scalar loss of a batch in a task, times its weight.

    With the weight, the mean over ranks that DistributedDataParallel takes is the exact mean over the
    samples of the global batch, also when the ranks' shares differ.
    """
    inputs_NCHW = task.inputs(batch)
    if hasattr(batch.images_NCHW, _MARK) and inputs_NCHW is not batch.images_NCHW:
        torch._dynamo.maybe_mark_dynamic(inputs_NCHW, 0)
    return task.loss(network(inputs_NCHW), batch, recipe) * batch.weight


def build_optimizer(network: nn.Module, recipe: Recipe, learning_rate: float) -> torch.optim.Optimizer:
    """The recipe's optimizer over all trained parameters of the network, updated in one pass where torch can."""
    decay, fused = recipe.weight_decay, _can_fuse(network)
    if recipe.optimizer == "muon":
        return Muon(network, learning_rate, recipe.momentum, decay, fused=fused)
    groups = parameter_groups(network, recipe, learning_rate)
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, learning_rate, recipe.momentum, weight_decay=decay, fused=fused)
    kind = torch.optim.AdamW if recipe.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, learning_rate, weight_decay=decay, fused=fused)


def settle(optimizer: torch.optim.Optimizer, network: nn.Module, *, is_captured: bool = False) -> None:
    """Fit an optimizer, with the state that was restored if any, to the network as it is executed now.

    A checkpoint brings the flags and the memory layout of the execution that wrote it, and fused kernels on CPUs go
    through weights, gradients and momenta by address, whatever their strides say (torch 2.13).

    Args:
        optimizer: of the network.
        network: on its device, in its layout.
        is_captured: in a CUDA graph, which reads the learning rate on the device, for it is another in each step.
    """
    for group in optimizer.param_groups:
        group["fused"] = _can_fuse(network)
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


def _can_fuse(network: nn.Module) -> bool:
    """Of sharded weights torch 2.13 has no fused SGD."""
    return not isinstance(network, FSDPModule)
