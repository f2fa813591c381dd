"""Metrics from rank 0 to MLflow while training goes on.

They leave from a thread of their own, so that no step waits for a server, and about once a second, because that thread
shares a core with the steps. Knows nothing of what they mean.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property

from mlflow.entities import Metric
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
from mlflow.tracking import MlflowClient

MAX_BATCH = 500
GATHER_SECONDS = 1.0
"""Writing one batch takes 5 to 20 ms of a core, however small it is."""
RETRY_SECONDS = 2.0
CLOSE_SECONDS = 60.0
FIRST_SAMPLES = 10
FIRST_SAMPLE_SECONDS = 1.0
SAMPLE_SECONDS = 10.0
"""Between samples of the machine's load, after the first ones, of which a short run has none other."""


class MetricsWriter:
    """Delivers metrics in order; keeps them while the store is away.

    Args:
        tracking_uri: of the store.
        run_id: of a run that exists.
        resumed: leave out what an earlier attempt has already written, so that curves have no doubles.
    """

    def __init__(self, tracking_uri: str, run_id: str, resumed: bool) -> None:
        self._tracking_uri = tracking_uri
        self._run_id = run_id
        self._resumed = resumed
        self._last_steps: dict[str, int] = {}
        self._queue: queue.SimpleQueue[Metric | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._deliver, name="metrics", daemon=True)
        self._thread.start()

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Queue metrics of a step; returns at once."""
        now = int(time.time() * 1000)
        for key, value in metrics.items():
            self._queue.put(Metric(key, value, now, step))

    def close(self) -> None:
        """Deliver what is queued, for a minute at most, and say on stderr what could not be delivered."""
        self._queue.put(None)
        self._thread.join(CLOSE_SECONDS)
        self._stop.set()
        if self._thread.is_alive():
            _say(f"{self._queue.qsize()} metrics could not be delivered to MLflow")

    def _deliver(self) -> None:
        closing = False
        while not closing:
            batch = self._next_batch()
            closing = None in batch
            metrics = [metric for metric in batch if metric is not None]
            while metrics and not self._try(metrics) and not self._stop.is_set():
                time.sleep(RETRY_SECONDS)

    def _next_batch(self) -> list[Metric | None]:
        """What comes within `GATHER_SECONDS` of the first; None is the end."""
        batch = [self._queue.get()]
        deadline = time.monotonic() + GATHER_SECONDS
        with suppress(queue.Empty):
            while batch[-1] is not None and len(batch) < MAX_BATCH:
                batch.append(self._queue.get(timeout=max(0.0, deadline - time.monotonic())))
        return batch

    @cached_property
    def _client(self) -> MlflowClient:
        return MlflowClient(self._tracking_uri)  # opens the store: not before a step, but beside it

    def _try(self, metrics: list[Metric]) -> bool:
        try:
            fresh = [metric for metric in metrics if metric.step > self._last_step(metric.key)]
            if fresh:
                self._client.log_batch(self._run_id, metrics=fresh, synchronous=True)
        except Exception as error:  # noqa: BLE001  whatever it is, this thread must live to try again
            _say(f"MLflow is away, metrics are kept: {error}")
            return False
        return True

    def _last_step(self, key: str) -> int:
        if not self._resumed:
            return -1
        if key not in self._last_steps:
            history = self._client.get_metric_history(self._run_id, key)
            self._last_steps[key] = max((metric.step for metric in history), default=-1)
        return self._last_steps[key]


def _say(sentence: str) -> None:
    with suppress(OSError):  # the log's disk may be full
        print(sentence, file=sys.stderr)  # noqa: T201


class _LoadMonitor(SystemMetricsMonitor):
    """MLflow's own samples of the machine, that leave with the other metrics.

    MLflow would ask the store for the run, and write to it, with every sample.
    """

    def __init__(self, writer: MetricsWriter, tracking_uri: str, run_id: str, resumed: bool) -> None:
        super().__init__(run_id, resume_logging=resumed, tracking_uri=tracking_uri)  # type: ignore[no-untyped-call]
        self._writer = writer
        self._num_samples = 0

    def monitor(self) -> None:
        """Sample until `finish`; at least once."""
        while True:
            self._sample()
            seconds = FIRST_SAMPLE_SECONDS if self._num_samples < FIRST_SAMPLES else SAMPLE_SECONDS
            if self._shutdown_event.wait(seconds):
                return

    def _sample(self) -> None:
        self.collect_metrics()  # type: ignore[no-untyped-call]
        found = self.aggregate_metrics()  # type: ignore[no-untyped-call]
        self._writer.log({self._metrics_prefix + name: value for name, value in found.items()}, self._logging_step)
        self._logging_step += 1
        self._num_samples += 1
        for part in self.monitors:
            part.clear_metrics()  # type: ignore[no-untyped-call]


@contextmanager
def system_metrics(writer: MetricsWriter, tracking_uri: str, run_id: str, resumed: bool) -> Iterator[None]:
    """Record this machine's load (CPU, memory, disk, network, GPUs) with the run while the body lasts."""
    monitor = _LoadMonitor(writer, tracking_uri, run_id, resumed)
    monitor.start()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        monitor.finish()  # type: ignore[no-untyped-call]
