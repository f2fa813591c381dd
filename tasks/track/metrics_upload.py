"""Uploads the metrics that ranks write to files to MLflow during a training, about once a second, from a thread."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context
from functools import cached_property
from pathlib import Path

from mlflow.entities import Metric
from mlflow.tracking import MlflowClient

from paceline.tasks.metrics_file import FILE, LoggedMetric, MetricsReader, attempts
from paceline.tasks.redact import redact

MAX_BATCH = 500
GATHER_SECONDS = 1.0  # writing one batch takes 5 to 20 ms of a core, however small it is
RETRY_SECONDS = 2.0
CLOSE_SECONDS = 5.0  # for what is left when a training ends
LAST_SECONDS = 720.0  # for what is still left when its run is about to be FINISHED: as MLflow's client tries

logger = logging.getLogger(__name__)

_left: dict[str, Path] = {}  # by run, directories of trainings with metrics that the store has not taken by their end


@contextmanager
def upload_metrics(directory: Path, tracking_uri: str, run_id: str) -> Iterator[None]:
    """Deliver what a training's ranks log, while the body lasts, and for `CLOSE_SECONDS` what is left of it then.

    No metric is sent twice. `upload_left` sends what the store did not accept.
    """
    delivery = _Delivery(directory, tracking_uri, run_id)
    try:
        yield
    finally:
        if not delivery.close(CLOSE_SECONDS):
            _left[run_id] = directory


def upload_rest(directory: Path, tracking_uri: str, run_id: str) -> None:
    """Deliver what a flow that is gone has left; arguments as for `upload_metrics`."""
    with upload_metrics(directory, tracking_uri, run_id):
        pass


def upload_left(tracking_uri: str, run_id: str) -> None:
    """Deliver the metrics that the store did not accept during the training of a run: the last try."""
    # By a client of its own, for the one before may be asleep between two tries.
    directory = _left.pop(run_id, None)
    if directory is not None and not _Delivery(directory, tracking_uri, run_id).close(LAST_SECONDS):
        files = f"{directory}/attempt-*/rank-0/{FILE}"
        logger.warning("MLflow did not accept all metrics of run %s; the rest stays in %s", run_id, files)


class _Delivery:
    def __init__(self, directory: Path, tracking_uri: str, run_id: str) -> None:
        self._tracking_uri, self._run_id = tracking_uri, run_id
        self._resumed = bool(attempts(directory))
        self._reader = MetricsReader(directory)
        self._batch: list[LoggedMetric] = []  # read, and not delivered yet
        self._last_steps: dict[str, int] = {}
        self._is_away = False
        self._closing, self._given_up = threading.Event(), threading.Event()
        # Prefect finds the flow of a log record by the thread's context.
        self._thread = threading.Thread(target=copy_context().run, args=(self._deliver,), name="metrics", daemon=True)
        self._thread.start()

    def close(self, seconds: float) -> bool:
        """Deliver what is left, for so long at most; whether that was enough."""
        self._closing.set()
        self._thread.join(seconds)
        self._given_up.set()
        return not self._thread.is_alive()

    def _deliver(self) -> None:
        while not self._given_up.is_set():
            is_last = self._closing.is_set()  # before looking: what was written until then is found
            try:
                while self._deliver_batch() and not self._given_up.is_set():
                    pass
            except Exception as error:  # noqa: BLE001  whatever it is, this thread must live to try again
                if not self._is_away:
                    logger.warning("Cannot upload metrics to MLflow; retrying: %s", redact(str(error)))
                self._is_away = True
                self._given_up.wait(RETRY_SECONDS)
                continue
            self._is_away = False
            if is_last:
                return
            self._closing.wait(GATHER_SECONDS)

    def _deliver_batch(self) -> bool:
        """Deliver the next metrics; False if there are none. What the store does not take are the next ones again."""
        self._batch = self._batch or self._reader.read(MAX_BATCH)
        fresh = [(name, value, when, step) for name, value, when, step in self._batch if step > self._last_step(name)]
        if fresh:
            self._client.log_batch(self._run_id, metrics=[Metric(*metric) for metric in fresh], synchronous=True)
            self._last_steps |= {name: step for name, _, _, step in fresh}
        delivered, self._batch = bool(self._batch), []
        return delivered

    @cached_property
    def _client(self) -> MlflowClient:
        return MlflowClient(self._tracking_uri)  # opens the store: in this thread, during the training

    def _last_step(self, name: str) -> int:
        """Up to which the store has a metric: from attempts before, or from a flow before."""
        if name not in self._last_steps:
            history = self._client.get_metric_history(self._run_id, name) if self._resumed else []
            self._last_steps[name] = max((metric.step for metric in history), default=-1)
        return self._last_steps[name]
