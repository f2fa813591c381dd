"""The training step: one for trainings, by way of Lightning's loop, and for the arms of a probe, in a bare one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tasks.model.objective import LabelledBatch
from tasks.records import Arm, Plan
from tasks.train.compiled import any_batch_size
from tasks.train.precision import forward_context

Enter = Callable[[str], object]
"""Takes the name of the part of a step that begins."""


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
        enter: Enter = lambda _: None,
    ) -> None:
        self._loss_of = loss_of
        self._optimizer = optimizer
        self._scaler = scaler
        self._is_double = execution.precision == "64-true"
        self._is_compiled = execution.compile == "step"
        self._context = forward_context(execution.precision, device, is_captured=execution.compile == "graph")
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
