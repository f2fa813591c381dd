"""The training step: one for trainings, by way of Lightning's loop, and for the arms of a probe, in a bare one.

Both arms of a probe run the same loop, so the ratio compares executions and nothing else. What Lightning costs on top
is in the time budget of the run (`loop`).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from conf.schema import Recipe
from tasks.model.objective import BatchSource, LabelledBatch, batch_loss, build_optimizer
from tasks.records import Arm, Plan
from tasks.train.compiled import any_batch_size, compile_network
from tasks.train.exchange import DDP_SETTINGS, compress_gradients
from tasks.train.precision import forward_context, make_scaler, prepare_network
from tasks.train.sharding import shard


class TrainStep:
    """Forward, backward, update.

    Args:
        loss_of: a batch's loss, times its weight.
        optimizer: of the weights that `loss_of` depends on.
        scaler: of the gradients; does nothing but for fp16.
        execution: its precision, and whether the network is compiled.
        device: where batches lie.
        enter: takes the name of the part that begins: `forward`, `backward`, `optimizer`, then `loop`.
    """

    def __init__(
        self,
        loss_of: Callable[[LabelledBatch], torch.Tensor],
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        execution: Arm | Plan,
        device: torch.device,
        enter: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._loss_of = loss_of
        self._optimizer = optimizer
        self._scaler = scaler
        self._is_double = execution.precision == "64-true"
        self._is_compiled = execution.compile == "step"
        self._context = forward_context(execution.precision, device)
        self._enter = enter

    def __call__(self, batch: LabelledBatch) -> torch.Tensor:
        """Take the step; its loss, still on the device."""
        self._enter("forward")
        if self._is_double:
            batch = batch._replace(images_NCHW=batch.images_NCHW.double())  # type: ignore[attr-defined]
        self._optimizer.zero_grad()
        if self._is_compiled:
            any_batch_size(batch.images_NCHW)
        with self._context:
            loss = self._loss_of(batch)
        self._enter("backward")
        self._scaler.scale(loss).backward()
        self._enter("optimizer")
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._enter("loop")
        return loss.detach()


@dataclass(frozen=True)
class StepInputs:
    """What every arm of a probe has in common."""

    network: nn.Module
    recipe: Recipe
    learning_rate: float
    device: torch.device


class BareStep:
    """Runs training steps of one arm on a copy of the network and times each, device work included.

    Args:
        inputs: the network is copied, never changed.
        arm: how to execute.
        loader: yields the arm's batches; is read epoch after epoch.
        num_steps: of an epoch's first steps to run; the last one may be ragged, and steps are compared per sample.
    """

    def __init__(self, inputs: StepInputs, arm: Arm, loader: BatchSource, num_steps: int) -> None:
        self._inputs = inputs
        self._arm = arm
        self._loader = loader
        self._num_steps = num_steps
        spread = arm.num_devices > 1 and arm.variant != "no_sync"
        channels_last = arm.memory_format == "channels_last" and not (spread and arm.strategy == "fsdp")
        network = prepare_network(copy.deepcopy(inputs.network), arm.precision, channels_last, inputs.device)
        if arm.compile == "step":
            compile_network(network)
        self._network = self._distributed(network) if spread else network
        self._step = TrainStep(
            lambda batch: batch_loss(self._network, batch, inputs.recipe),
            build_optimizer(network, inputs.recipe, inputs.learning_rate),
            make_scaler(arm.precision, inputs.device),
            arm,
            inputs.device,
        )
        self._batches = self._endless()

    def _distributed(self, network: nn.Module) -> nn.Module:
        if self._arm.strategy == "fsdp":
            shard(network, init_device_mesh(self._inputs.device.type, (distributed.get_world_size(),)))
            return network
        wrapped = DistributedDataParallel(network, **DDP_SETTINGS)  # type: ignore[arg-type]
        if self._arm.variant == "token_sync":
            token = torch.zeros(1, device=self._inputs.device)
            # A lambda, because torch rejects annotations that are text, as those of this module are.
            wrapped.register_comm_hook(token, lambda token, bucket: _exchange(token, bucket))  # noqa: PLW0108
        else:
            compress_gradients(wrapped, self._arm.gradient_compression)
        return wrapped

    def run(self, num_steps: int) -> list[float]:
        """Seconds of each of `num_steps` steps: batch, forward, backward, update.

        On a GPU each is the mean of all: waiting for the device in every step would slow the faster arm most.
        """
        if self._inputs.device.type == "cuda":
            return [self._timed(num_steps) / num_steps] * num_steps
        return [self._timed(1) for _ in range(num_steps)]

    def close(self) -> None:
        """Let go of the network, the optimizer and the batches."""
        self._batches.close()
        del self._network, self._step, self._batches

    def _timed(self, num_steps: int) -> float:
        self._synchronize()
        started = time.perf_counter()
        for _ in range(num_steps):
            self._step(next(self._batches))
        self._synchronize()
        return time.perf_counter() - started

    def _endless(self) -> Generator[LabelledBatch, None, None]:
        epoch = 0
        while True:
            self._loader.seek(epoch * len(self._loader))
            yield from islice(self._loader, self._num_steps)
            epoch += 1

    def _synchronize(self) -> None:
        if self._inputs.device.type == "cuda":
            torch.cuda.synchronize(self._inputs.device)


def _exchange(message: torch.Tensor, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Communication hook: exchange a message in place of the gradients of a `torch.distributed.GradBucket`."""
    exchanged: torch.futures.Future[list[torch.Tensor]] = distributed.all_reduce(message, async_op=True).get_future()
    return exchanged.then(lambda _: bucket.buffer())
