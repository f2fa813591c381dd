"""The training step as one CUDA graph: recorded once, then launched without the host's work per kernel.

The eager step on one device is recorded; batches of another shape, such as a ragged last one, run it eagerly. The
method is that of torch's documentation ("CUDA semantics", "Whole-network capture"): eager steps on a side stream first,
inputs at fixed addresses, gradients in the graph's own memory, no autocast cache, learning rates on the device.
"""

import time

import torch

from paceline.tasks.model.batch import Batch
from paceline.tasks.records.execution import Arm, Plan
from paceline.tasks.records.training import CompileStats
from paceline.tasks.train.step.train_step import Enter, TrainStep

NUM_EAGER = 3  # steps before the recording, in which cuDNN chooses its algorithms and optimizers create their state


class CapturedStep:
    """A step that replays its CUDA graph; its optimizer must be prepared for that."""

    def __init__(self, step: TrainStep, device: torch.device, enter: Enter = lambda _: None) -> None:
        self._step = step
        self._enter = enter
        self._stream = torch.cuda.Stream(device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._input: Batch | None = None
        self._loss: torch.Tensor | None = None
        self._largest = 0
        self._num_alike = 0
        """Number of eager steps on batches of the largest size."""
        self._num_calls = 0
        self._num_replays = 0
        self._seconds = 0.0

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Take the step; return its loss on the device."""
        self._num_calls += 1
        size = len(batch.labels_N)
        if self._graph is None:
            if size > self._largest:
                self._largest, self._num_alike = size, 0
            if size < self._largest or self._num_alike < NUM_EAGER:
                self._num_alike += size == self._largest
                return self._eager(batch)
            self._capture(batch)
        if size != self._largest:
            return self._eager(batch)
        return self._replay(batch)

    def stats(self) -> CompileStats | None:
        """Number of graph launches; None without a graph."""
        if self._graph is None:
            return None
        return CompileStats(
            num_calls=self._num_calls, num_graphs=1, hit_rate=self._num_replays / self._num_calls, seconds=self._seconds
        )

    def _eager(self, batch: Batch) -> torch.Tensor:
        """Run the step on the recording's stream, to which its gradients and optimizer state belong."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            loss = self._step(batch)
        current.wait_stream(self._stream)
        for tensor in _tensors(batch).values():
            tensor.record_stream(self._stream)
        loss.record_stream(current)
        return loss

    def _capture(self, batch: Batch) -> None:
        torch.cuda.synchronize(self._stream.device)
        started = time.perf_counter()
        copies = {name: tensor.clone() for name, tensor in _tensors(batch).items()}
        self._input = batch._replace(**copies)  # type: ignore[arg-type]
        assert self._input is not None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            self._loss = self._step(self._input)
        self._graph = graph
        torch.cuda.synchronize(self._stream.device)
        self._seconds = time.perf_counter() - started

    def _replay(self, batch: Batch) -> torch.Tensor:
        assert self._graph is not None
        assert self._input is not None
        assert self._loss is not None
        self._enter("graph")
        tensors = _tensors(batch)
        for name, tensor in _tensors(self._input).items():
            tensor.copy_(tensors[name])
        self._graph.replay()
        self._num_replays += 1
        self._enter("loop")
        return self._loss.clone()


def _tensors(batch: Batch) -> dict[str, torch.Tensor]:
    fields = batch._asdict()
    return {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}


def make_step(
    step: TrainStep, execution: Arm | Plan, device: torch.device, enter: Enter = lambda _: None
) -> TrainStep | CapturedStep:
    """The step as the execution demands: eager or captured."""
    return CapturedStep(step, device, enter) if execution.compile == "graph" else step
