"""The training step as one CUDA graph: recorded once, then launched without the host's work per kernel.

Batches of fewer samples, such as a ragged last one, run the step eagerly; images of another size, as of
`recipe.progressive_size`, are recorded again. The method is that of torch's documentation ("CUDA semantics",
"Whole-network capture" and "Usage with DistributedDataParallel"): eager steps on a side stream first, inputs at fixed
addresses, gradients in the graph's own memory, no autocast cache, learning rates on the device. NCCL asks that all
ranks replay or none, so that each decides by the size of the batch over all ranks.
"""

import time
from contextlib import nullcontext

import torch

from paceline.conf.execution import CAPTURED
from paceline.tasks.errors import CaptureError, causes_of, one_line
from paceline.tasks.model.batch import Batch
from paceline.tasks.model.out_of_memory import is_out_of_memory
from paceline.tasks.records.execution import Arm, Plan
from paceline.tasks.records.training import CompileStats
from paceline.tasks.train.step.train_step import Enter, TrainStep

NUM_EAGER = 3  # steps before the recording, in which cuDNN chooses its algorithms and optimizers create their state
NUM_EAGER_EXCHANGES = 11  # steps before it with DistributedDataParallel, which times its first ten by events


class CapturedStep:
    """A step, eager or compiled, that replays its CUDA graph; its optimizer must be prepared for that.

    Parts of a step are those of `TrainStep`; the recording is `capture`, a replay `graph`. `num_eager` steps run before
    the recording.
    """

    def __init__(
        self, step: TrainStep, device: torch.device, num_eager: int = NUM_EAGER, enter: Enter = lambda _: None
    ) -> None:
        self._step, self.num_eager, self._enter = step, num_eager, enter
        self._stream = torch.cuda.Stream(device)
        self._recorded: tuple[torch.cuda.CUDAGraph, dict[str, torch.Tensor], torch.Tensor] | None = None
        """The graph, its inputs by the fields of a batch, and its loss."""
        self._largest = 0.0
        self._image_shape: torch.Size | None = None
        self._num_alike = 0  # number of eager steps on batches of the largest size
        self.num_warm_up_steps = 0  # number of steps up to a recording, and of those that were recorded
        self._num_graphs = self._num_calls = self._num_replays = 0
        self._seconds = 0.0

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Take the step; return its loss on the device.

        Raises MemoryLimitError as `TrainStep` does; CaptureError: the step cannot be recorded. CUDA may refuse all
        further work of this process.
        """
        self._num_calls += 1
        image_shape = batch.images_NCHW.shape[1:]
        if image_shape != self._image_shape:
            self._recorded, self._image_shape, self._largest = None, image_shape, 0.0
        # Mean over the ranks, the same on all of them; a rank without samples has no weight.
        size = round(len(batch.labels_N) / batch.weight, 3) if batch.weight else 0.0
        if self._recorded is None:
            self.num_warm_up_steps += 1
            if size > self._largest:
                self._largest, self._num_alike = size, 0
            if size < self._largest or self._num_alike < self.num_eager:
                self._num_alike += size == self._largest
                return self._eager(batch, is_ragged=size < self._largest)
            self._capture(batch)
        if size != self._largest:
            return self._eager(batch, is_ragged=True)
        return self._replay(batch)

    def stats(self) -> CompileStats | None:
        """Number of graph launches; None without a graph."""
        if not self._num_graphs:
            return None
        return CompileStats(
            num_calls=self._num_calls,
            num_graphs=self._num_graphs,
            hit_rate=self._num_replays / self._num_calls,
            seconds=self._seconds,
        )

    def _eager(self, batch: Batch, *, is_ragged: bool) -> torch.Tensor:
        """Run the step on the recording's stream, to which its gradients and optimizer state belong."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        # A compiled network has static shapes; for a ragged batch it is eager, because compiling takes longer.
        stance = torch.compiler.set_stance("force_eager") if is_ragged else nullcontext()
        with torch.cuda.stream(self._stream), stance:
            loss = self._step(batch)
        current.wait_stream(self._stream)
        for tensor in _tensors(batch).values():
            tensor.record_stream(self._stream)
        loss.record_stream(current)
        return loss

    def _capture(self, batch: Batch) -> None:
        self._enter("capture")
        torch.cuda.synchronize(self._stream.device)
        started = time.perf_counter()
        copies = {name: tensor.clone() for name, tensor in _tensors(batch).items()}
        static = batch._replace(**copies)  # type: ignore[arg-type]
        graph = torch.cuda.CUDAGraph()
        # Threads of loaders and of NCCL use the device meanwhile, which only this thread must not.
        try:
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                loss = self._step(static)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            cause: BaseException = error
            while cause.__context__ is not None:  # the end of an interrupted recording fails as well
                cause = cause.__context__
            raise CaptureError(f"the step cannot be recorded as a CUDA graph: {one_line(cause)}") from error
        self._recorded = graph, copies, loss
        self._num_graphs += 1
        torch.cuda.synchronize(self._stream.device)
        self._seconds += time.perf_counter() - started

    def _replay(self, batch: Batch) -> torch.Tensor:
        assert self._recorded is not None
        graph, inputs, loss = self._recorded
        self._enter("graph")
        tensors = _tensors(batch)
        for name, tensor in inputs.items():
            tensor.copy_(tensors[name])
        graph.replay()
        self._num_replays += 1
        self._enter("loop")
        return loss.clone()


def capture_error(error: BaseException | None) -> CaptureError | None:
    """The failed recording behind an error, which may be of what was done on the device afterwards."""
    return next((cause for cause in causes_of(error) if isinstance(cause, CaptureError)), None)


def _tensors(batch: Batch) -> dict[str, torch.Tensor]:
    return {name: value for name, value in batch._asdict().items() if isinstance(value, torch.Tensor)}


def make_step(
    step: TrainStep, execution: Arm | Plan, device: torch.device, enter: Enter = lambda _: None
) -> TrainStep | CapturedStep:
    """The step as the execution demands: eager, compiled or captured."""
    if execution.compile not in CAPTURED:
        return step
    num_ranks = execution.num_devices if isinstance(execution, Arm) else execution.world_size
    return CapturedStep(step, device, NUM_EAGER if num_ranks == 1 else NUM_EAGER_EXCHANGES, enter)
