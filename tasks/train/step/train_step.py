"""The training step, the same for trainings (`epoch_loop`) and for the arms of a probe (`benchmark_step`).

Micro-batches are a rank's share of a batch in several passes. The loss of a batch is a mean over its samples, and that
of a pass is weighted by its part of them. So the sums over the passes, of losses and of gradients, are those of the
batch, also where the passes differ in size.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise

import torch

from paceline.conf.execution import CAPTURED
from paceline.tasks.errors import MeasureMemoryError, MemoryLimitError, causes_of
from paceline.tasks.model.batch import Batch, take_samples
from paceline.tasks.model.optimization import WeightAverage
from paceline.tasks.model.out_of_memory import is_out_of_memory
from paceline.tasks.records.execution import Arm, Plan
from paceline.tasks.train.step.compile import any_batch_size
from paceline.tasks.train.step.precision import forward_context

Enter = Callable[[str], object]  # takes the name of the part of a step that starts


class TrainStep:
    """Forward and backward, in one pass or several, then the update.

    `loss_of` is a batch's loss, times its weight. With a context `no_sync`, as of DistributedDataParallel, ranks
    exchange gradients in the last pass only. `enter` takes the name of the part that starts: `forward`, `backward`,
    `optimizer`, then `loop`.
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
        self._loss_of, self._optimizer, self._scaler = loss_of, optimizer, scaler
        self._enter, self._average = enter, average
        self._is_double = execution.precision == "64-true"
        self._compile = execution.compile
        self._context = forward_context(execution.precision, device, is_captured=execution.compile in CAPTURED)
        self._micro_batch = execution.micro_batch
        self._updates = not (isinstance(execution, Arm) and execution.variant == "no_update")
        self._alone: Callable[[], AbstractContextManager[object]] = getattr(loss_of, "no_sync", nullcontext)
        self.num_passes = 0  # number of passes through the network
        self.num_steps = 0

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Take the step; return its loss on the device.

        Raises MemoryLimitError: a pass or the update needs more memory than the device has. A failed update may have
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


def split_into_micro_batches(batch: Batch, largest: int | None) -> list[Batch]:
    """Split a batch into the fewest parts of at most `largest` samples; sizes differ by one at most."""
    num = len(batch.labels_N)
    number = 1 if largest is None else max(1, -(-num // largest))
    if number == 1:
        return [batch]
    # Even parts, because batch norms take their statistics over each: those of a small last part would be poor.
    bounds = [num * part // number for part in range(number + 1)]
    return [take_samples(batch, start, stop) for start, stop in pairwise(bounds)]


def raise_if_out_of_memory(error: Exception, what: str, num_samples: int, device: torch.device) -> None:
    """Raise MemoryLimitError for an error of `what`, a part of a step over so many samples, that is want of memory."""
    if is_out_of_memory(error):
        fault = f"{what} over {num_samples} samples needs more memory than {device} has"
        raise MemoryLimitError(f"{fault}: {error}", num_samples) from error


def oom_sample_count(error: BaseException | None) -> int | None:
    """The number of samples of the training's pass that ran out of memory and caused `error`; None for other errors."""
    limits = (cause for cause in causes_of(error) if isinstance(cause, (MemoryLimitError, MeasureMemoryError)))
    first = next(limits, None)
    return first.num_samples if isinstance(first, MemoryLimitError) else None
