"""The loop in which all arms of a probe run the training step, each on a copy of the network.

One loop for all, so that ratios compare executions only; Lightning's own cost is `loop` in the time budget.
"""

import copy
import time
from collections.abc import Generator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from paceline.conf.execution import CAPTURED, COMPILED
from paceline.conf.recipe import Recipe
from paceline.tasks.model.batch import Batch, BatchSource
from paceline.tasks.model.objectives import Task
from paceline.tasks.model.optimization import WeightAverage, batch_loss, build_optimizer, prepare_optimizer_state
from paceline.tasks.records.execution import Arm
from paceline.tasks.train.step.activation_checkpointing import checkpoint_activations
from paceline.tasks.train.step.compile import compile_network
from paceline.tasks.train.step.cuda_graph import CapturedStep, make_step
from paceline.tasks.train.step.distributed import DDP_SETTINGS, apply_fsdp, compress_gradients
from paceline.tasks.train.step.precision import make_scaler, prepare_network, set_arithmetic
from paceline.tasks.train.step.train_step import TrainStep


@dataclass(frozen=True)
class StepInputs:
    """Inputs that all arms of a probe share."""

    network: nn.Module
    task: Task
    recipe: Recipe
    learning_rate: float
    device: torch.device


class _Objective:
    def __init__(self, network: nn.Module, inputs: StepInputs) -> None:
        self._network, self._inputs = network, inputs
        self.no_sync = getattr(network, "no_sync", nullcontext)

    def __call__(self, batch: Batch) -> torch.Tensor:
        return batch_loss(self._network, batch, self._inputs.recipe, self._inputs.task)


class BareStep:
    """Runs training steps of one arm on a copy of the network and times each, device work included.

    `loader` is read epoch after epoch, and `num_steps` of each are run: the last step may be ragged, and steps are
    compared per sample.
    """

    def __init__(self, inputs: StepInputs, arm: Arm, loader: BatchSource, num_steps: int) -> None:
        self._inputs, self._arm, self._loader, self._num_steps = inputs, arm, loader, num_steps
        spread = arm.num_devices > 1 and arm.variant != "no_sync"
        channels_last = arm.memory_format == "channels_last" and not (spread and arm.strategy == "fsdp")
        network = prepare_network(copy.deepcopy(inputs.network), arm.precision, channels_last, inputs.device)
        if arm.activation_checkpointing:
            checkpoint_activations(network)
        if arm.compile in COMPILED:
            compile_network(network)
        self._network = self._wrap_for_group(network) if spread else network
        optimizer = build_optimizer(network, inputs.recipe, inputs.learning_rate)
        prepare_optimizer_state(optimizer, network, is_captured=arm.compile in CAPTURED)
        average = None if inputs.recipe.ema is None else WeightAverage(network, inputs.recipe.ema)
        objective, scaler = _Objective(self._network, inputs), make_scaler(arm.precision, inputs.device)
        step = TrainStep(objective, optimizer, scaler, arm, inputs.device, average=average)
        self._step = make_step(step, arm, inputs.device)
        self._loss = torch.zeros(())
        self._batches = self._endless()
        if isinstance(self._step, CapturedStep):
            self.run(self._step.num_eager + 1)  # without the time of the recording

    def _wrap_for_group(self, network: nn.Module) -> nn.Module:
        if self._arm.strategy == "fsdp":
            mesh = init_device_mesh(self._inputs.device.type, (distributed.get_world_size(),))
            apply_fsdp(network, mesh, self._arm.precision)
            return network
        # In a stream of its own, or a graph could not capture its backward pass; Lightning does the same.
        is_on_gpu = self._inputs.device.type == "cuda"
        with torch.cuda.stream(torch.cuda.Stream()) if is_on_gpu else nullcontext():
            wrapped = DistributedDataParallel(network, **DDP_SETTINGS)  # type: ignore[arg-type]
        if self._arm.variant == "token_sync":
            token = torch.zeros(1, device=self._inputs.device)
            # A lambda, because torch rejects annotations that are text, as those of this module are.
            wrapped.register_comm_hook(token, lambda token, bucket: exchange(token, bucket))  # noqa: PLW0108
        else:
            compress_gradients(wrapped, self._arm.gradient_compression)
        return wrapped

    def run(self, num_steps: int) -> list[float]:
        """Seconds of each of `num_steps` steps: batch, forward, backward, update; on a GPU each is the mean of all."""
        set_arithmetic(self._arm.precision, self._inputs.device)
        if self._inputs.device.type == "cuda":  # waiting for the device in every step would slow the faster arm most
            return [self._time_steps(num_steps) / num_steps] * num_steps
        return [self._time_steps(1) for _ in range(num_steps)]

    def has_diverged(self) -> bool:
        """Whether the loss of the last step is not a finite number; waits for the device."""
        return not bool(torch.isfinite(self._loss))

    def close(self) -> None:
        """Release the network, the optimizer and the batches."""
        self._batches.close()
        del self._network, self._step, self._batches, self._loss

    def _time_steps(self, num_steps: int) -> float:
        self._synchronize()
        started = time.perf_counter()
        for _ in range(num_steps):
            self._loss = self._step(next(self._batches))
        self._synchronize()
        return time.perf_counter() - started

    def _endless(self) -> Generator[Batch, None, None]:
        epoch = 0
        while True:
            self._loader.seek(epoch * len(self._loader))
            yield from islice(self._loader, self._num_steps)
            epoch += 1

    def _synchronize(self) -> None:
        if self._inputs.device.type == "cuda":
            torch.cuda.synchronize(self._inputs.device)


def exchange(message: torch.Tensor, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Communication hook: exchange a message instead of the gradients of a `torch.distributed.GradBucket`."""
    exchanged: torch.futures.Future[list[torch.Tensor]] = distributed.all_reduce(message, async_op=True).get_future()
    return exchanged.then(lambda _: bucket.buffer())
