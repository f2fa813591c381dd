"""The training step, the same for trainings (`epoch_loop`) and for the arms of a probe (`benchmark_step`)."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from paceline.conf.execution import CAPTURED
from paceline.tasks.model.batch import Batch
from paceline.tasks.model.optimization import WeightAverage
from paceline.tasks.records.execution import Arm, Plan
from paceline.tasks.train.step.compile import any_batch_size
from paceline.tasks.train.step.micro_batches import raise_if_out_of_memory, split_into_micro_batches
from paceline.tasks.train.step.precision import forward_context

Enter = Callable[[str], object]  # takes the name of the part of a step that starts


class TrainStep:
    """Forward and backward, in one pass or several, then the update.

    Args:
        loss_of: a batch's loss, times its weight. With a context `no_sync`, as of DistributedDataParallel, ranks
            exchange gradients in the last pass only.
        optimizer: of the network's weights.
        scaler: of the gradients; active for fp16 only.
        execution: precision, compilation and micro-batch.
        device: of the batches.
        enter: takes the name of the part that starts: `forward`, `backward`, `optimizer`, then `loop`.
        average: of the weights, if any.
    """

    def __init__(
        self,
        loss_of: Callable[[Batch], torch.Tensor],
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        execution: Arm | Plan,
        device: torch.device,
        enter: Enter = lambda _: None,
        average: WeightAverage | None = None,
    ) -> None:
        self._average = average
        self._loss_of = loss_of
        self._optimizer = optimizer
        self._scaler = scaler
        self._is_double = execution.precision == "64-true"
        self._compile = execution.compile
        self._context = forward_context(execution.precision, device, is_captured=execution.compile in CAPTURED)
        self._enter = enter
        self._micro_batch = execution.micro_batch
        self._updates = not (isinstance(execution, Arm) and execution.variant == "no_update")
        self._alone: Callable[[], AbstractContextManager[object]] = getattr(loss_of, "no_sync", nullcontext)
        self.num_passes = 0
        """Number of passes through the network."""
        self.num_steps = 0

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Take the step; return its loss on the device.

        Raises:
            MemoryLimitError: a pass or the update needs more memory than the device has. A failed update may have
                changed some of the weights: the training must resume from a checkpoint.
        """
        self.num_steps += 1
        self._optimizer.zero_grad()
        *first_parts, last = split_into_micro_batches(batch, self._micro_batch)
        losses = []
        for part in first_parts:
            with self._alone():
                losses.append(self._pass(part))
        losses.append(self._pass(last))
        self._enter("optimizer")
        try:
            if self._updates:
                self._scaler.step(self._optimizer)
                self._scaler.update()
            if self._updates and self._average is not None:
                self._average.update()
        except RuntimeError as error:
            raise_if_out_of_memory(error, "the update after a pass", len(last.labels_N), batch.images_NCHW.device)
            raise
        self._enter("loop")
        return torch.stack(losses).sum() if first_parts else losses[0]

    def _pass(self, batch: Batch) -> torch.Tensor:
        self.num_passes += 1
        self._enter("forward")
        if self._is_double:
            batch = batch._replace(images_NCHW=batch.images_NCHW.double())
        if self._compile == "step":
            any_batch_size(batch.images_NCHW)
        elif self._compile == "step_graph":
            torch._dynamo.mark_static(batch.images_NCHW)
        try:
            with self._context:
                loss = self._loss_of(batch)
            self._enter("backward")
            self._scaler.scale(loss).backward()
        except RuntimeError as error:
            raise_if_out_of_memory(error, "a pass", len(batch.labels_N), batch.images_NCHW.device)
            raise
        return loss.detach()
