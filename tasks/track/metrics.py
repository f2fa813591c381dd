"""Metrics from rank 0 to MLflow while training goes on.

They leave from a thread of their own, so that no step waits for a server. Knows nothing of what they mean.
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
RETRY_SECONDS = 2.0
CLOSE_SECONDS = 60.0
SYSTEM_METRICS_SECONDS = 1


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
            batch = [self._queue.get()]
            while len(batch) < MAX_BATCH and not self._queue.empty():
                batch.append(self._queue.get())
            closing = None in batch
            metrics = [metric for metric in batch if metric is not None]
            while metrics and not self._try(metrics) and not self._stop.is_set():
                time.sleep(RETRY_SECONDS)

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


@contextmanager
def system_metrics(tracking_uri: str, run_id: str, resumed: bool) -> Iterator[None]:
    """Record this machine's load (CPU, memory, disk, network, GPUs) with the run while the body lasts."""
    monitor = SystemMetricsMonitor(  # type: ignore[no-untyped-call]
        run_id,
        sampling_interval=SYSTEM_METRICS_SECONDS,
        samples_before_logging=1,  # short runs would else log nothing
        resume_logging=resumed,
        tracking_uri=tracking_uri,
    )
    first_step = monitor._logging_step
    monitor.start()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        monitor.finish()  # type: ignore[no-untyped-call]
        if monitor._logging_step == first_step:
            _sample_once(monitor)


def _sample_once(monitor: SystemMetricsMonitor) -> None:
    """A body shorter than the sampling interval would else leave nothing."""
    monitor.collect_metrics()  # type: ignore[no-untyped-call]
    monitor.publish_metrics(monitor.aggregate_metrics())  # type: ignore[no-untyped-call]
    monitor.mlflow_logger.flush()  # type: ignore[no-untyped-call]
