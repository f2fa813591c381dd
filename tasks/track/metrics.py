"""Metrics from rank 0 to MLflow while training goes on.

They leave from a thread of their own, so that no step waits for a server, and about once a second, because that thread
shares a core with the steps. Knows nothing of what they mean.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import islice

from mlflow.entities import Metric
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
from mlflow.tracking import MlflowClient

from tasks.records import KeptMetric
from tasks.redact import redact

MAX_BATCH = 500
GATHER_SECONDS = 1.0
"""Writing one batch takes 5 to 20 ms of a core, however small it is."""
RETRY_SECONDS = 2.0
CLOSE_SECONDS = 60.0
FIRST_SAMPLES = 10
FIRST_SAMPLE_SECONDS = 1.0
SAMPLES = "system/"
"""What the names of MLflow's system metrics begin with."""
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
        self._kept: deque[KeptMetric] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._deliver, name="metrics", daemon=True)
        self._thread.start()

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Keep metrics of a step for delivery; returns at once."""
        now = int(time.time() * 1000)
        self.log_again((key, value, now, step) for key, value in metrics.items())

    def log_again(self, kept: Iterable[KeptMetric]) -> None:
        """Keep what an earlier attempt could not deliver."""
        with self._changed:
            self._kept.extend(kept)
            self._changed.notify()

    def undelivered(self) -> list[KeptMetric]:
        """What the store has not confirmed yet, the oldest first; without samples of the machine."""
        with self._changed:
            return [kept for kept in self._kept if not kept[0].startswith(SAMPLES)]

    def close(self) -> None:
        """Deliver what is kept, for a minute at most, and say on stderr what could not be delivered."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(CLOSE_SECONDS)
        self._given_up.set()
        if self._thread.is_alive():
            _say(f"{len(self._kept)} metrics could not be delivered to MLflow")

    def _deliver(self) -> None:
        while batch := self._next_batch():
            if self._try(batch):
                with self._changed:
                    for _ in batch:
                        self._kept.popleft()
            elif self._given_up.wait(RETRY_SECONDS):
                return

    def _next_batch(self) -> list[KeptMetric]:
        """What is kept, `GATHER_SECONDS` after there is anything; empty at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._kept or self._closing)
            self._changed.wait_for(lambda: len(self._kept) >= MAX_BATCH or self._closing, GATHER_SECONDS)
            return list(islice(self._kept, MAX_BATCH))

    @cached_property
    def _client(self) -> MlflowClient:
        return MlflowClient(self._tracking_uri)  # opens the store: not before a step, but beside it

    def _try(self, batch: list[KeptMetric]) -> bool:
        try:
            metrics = [Metric(key, value, when, self._placed(key, step)) for key, value, when, step in batch]
            fresh = [metric for metric in metrics if metric.step > self._last_step(metric.key)]
            if fresh:
                self._client.log_batch(self._run_id, metrics=fresh, synchronous=True)
        except Exception as error:  # noqa: BLE001  whatever it is, this thread must live to try again
            _say(f"MLflow is away, metrics are kept: {error}")
            return False
        return True

    def _placed(self, key: str, step: int) -> int:
        """Samples of the machine are counted on from an earlier attempt's; training steps are what they are."""
        return step + 1 + self._last_step(key) if key.startswith(SAMPLES) else step

    def _last_step(self, key: str) -> int:
        if not self._resumed:
            return -1
        if key not in self._last_steps:
            history = self._client.get_metric_history(self._run_id, key)
            self._last_steps[key] = max((metric.step for metric in history), default=-1)
        return self._last_steps[key]


def _say(sentence: str) -> None:
    with suppress(OSError):  # the log's disk may be full
        print(redact(sentence), file=sys.stderr)  # noqa: T201


class _LoadMonitor(SystemMetricsMonitor):
    """MLflow's own samples of the machine, that leave with the other metrics.

    MLflow would ask the store for the run, and write to it, with every sample.
    """

    def __init__(self, writer: MetricsWriter, tracking_uri: str, run_id: str) -> None:
        super().__init__(run_id, tracking_uri=tracking_uri)  # type: ignore[no-untyped-call]
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
        self._writer.log({SAMPLES + name: value for name, value in found.items()}, self._num_samples)
        self._num_samples += 1
        for part in self.monitors:
            part.clear_metrics()  # type: ignore[no-untyped-call]


@contextmanager
def system_metrics(writer: MetricsWriter, tracking_uri: str, run_id: str) -> Iterator[None]:
    """Record this machine's load (CPU, memory, disk, network, GPUs) with the run while the body lasts."""
    monitor = _LoadMonitor(writer, tracking_uri, run_id)
    monitor.start()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        monitor.finish()  # type: ignore[no-untyped-call]
