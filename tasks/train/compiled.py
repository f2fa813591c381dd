"""What `torch.compile` did for a network: graphs, seconds, and how often a call found its graph ready.

Knows nothing of arms and phases. The figures are dynamo's own, of the whole process, so that a watch reports what was
added since its making.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from torch._dynamo import utils

from tasks.records import CompileStats

T = TypeVar("T")


class CompileWatch:
    """Counts from its making on."""

    def __init__(self) -> None:
        self._num_graphs = _num_graphs()
        self._seconds = _seconds()
        self._num_calls = 0

    def calls(self, batches: Iterable[T]) -> Iterator[T]:
        """The batches, each counted as one call of the network."""
        for batch in batches:
            self._num_calls += 1
            yield batch

    def add_calls(self, number: int) -> None:
        """Count calls that were made elsewhere."""
        self._num_calls += number

    def stats(self) -> CompileStats | None:
        """What was compiled since; None without calls or graphs."""
        num_graphs = _num_graphs() - self._num_graphs
        if not self._num_calls or not num_graphs:
            return None
        return CompileStats(
            num_calls=self._num_calls,
            num_graphs=num_graphs,
            hit_rate=max(0.0, 1 - num_graphs / self._num_calls),
            seconds=_seconds() - self._seconds,
        )


def _num_graphs() -> int:
    return int(utils.counters["stats"]["unique_graphs"])


def _seconds() -> float:
    return sum(metric.entire_frame_compile_time_s or 0.0 for metric in utils.get_compilation_metrics())
