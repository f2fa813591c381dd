"""The training step as one CUDA graph: recorded once, then launched as a whole, without the host's work per kernel.

What is recorded is the eager step on one device; batches of another shape, such as a ragged last one, take it as it is.
The recipe of torch's documentation ("CUDA semantics", "Whole-network capture"): eager steps on a side stream first,
inputs at fixed addresses, gradients in the graph's own memory, no autocast cache, learning rates on the device.
"""

from __future__ import annotations

import time

import torch

from paceline.tasks.model.batch import LabelledBatch
from paceline.tasks.records import Arm, CompileStats, Plan
from paceline.tasks.train.step.train_step import Enter, TrainStep

NUM_EAGER = 3
"""Steps before the recording: cuDNN chooses its algorithms, optimizers make their state. They train like any other."""


class CapturedStep:
    """Takes the place of a step whose optimizer is settled for it."""

    def __init__(self, step: TrainStep, device: torch.device, enter: Enter = lambda _: None) -> None:
        self._step = step
        self._enter = enter
        self._stream = torch.cuda.Stream(device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._input: LabelledBatch | None = None
        self._loss: torch.Tensor | None = None
        self._largest = 0
        self._num_alike = 0
        """Eager steps on batches of the largest size."""
        self._num_calls = 0
        self._num_replays = 0
        self._seconds = 0.0

    def __call__(self, batch: LabelledBatch) -> torch.Tensor:
        """Take the step; its loss, still on the device."""
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
        """How many steps were launched as the graph; None without one."""
        if self._graph is None:
            return None
        return CompileStats(
            num_calls=self._num_calls,
            num_graphs=1,
            hit_rate=self._num_replays / self._num_calls,
            seconds=self._seconds,
        )

    def _eager(self, batch: LabelledBatch) -> torch.Tensor:
        """On the stream of the recording, whose gradients and optimizer state must not be another's."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            loss = self._step(batch)
        current.wait_stream(self._stream)
        for tensor in _tensors(batch).values():
            tensor.record_stream(self._stream)
        loss.record_stream(current)
        return loss

    def _capture(self, batch: LabelledBatch) -> None:
        """Record the step; it is not taken."""
        torch.cuda.synchronize(self._stream.device)
        started = time.perf_counter()
        copies = {name: tensor.clone() for name, tensor in _tensors(batch).items()}
        self._input = batch._replace(**copies)  # type: ignore[attr-defined]
        assert self._input is not None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            self._loss = self._step(self._input)
        self._graph = graph
        torch.cuda.synchronize(self._stream.device)
        self._seconds = time.perf_counter() - started

    def _replay(self, batch: LabelledBatch) -> torch.Tensor:
        assert self._graph is not None
        assert self._input is not None
        assert self._loss is not None
        self._enter("graph")
        given = _tensors(batch)
        for name, tensor in _tensors(self._input).items():
            tensor.copy_(given[name])
        self._graph.replay()
        self._num_replays += 1
        self._enter("loop")
        return self._loss.clone()


def _tensors(batch: LabelledBatch) -> dict[str, torch.Tensor]:
    """What of a batch lies on the device."""
    fields = batch._asdict()  # type: ignore[attr-defined]
    return {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}


def make_step(
    step: TrainStep, execution: Arm | Plan, device: torch.device, enter: Enter = lambda _: None
) -> TrainStep | CapturedStep:
    """The step as an execution has it: as it is, or captured."""
    return CapturedStep(step, device, enter) if execution.compile == "graph" else step
