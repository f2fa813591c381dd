"""Prediction on Dask. Neither pixels nor predictions pass through the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, TypeVar
from uuid import uuid4

from paceline.tasks import deadline
from paceline.tasks.cluster.bounded_submit import connect_to_workers, iter_results
from paceline.tasks.predict.job import Part, PartRecord, Settings
from paceline.tasks.predict.part import predict_part

if TYPE_CHECKING:
    from distributed import Future

RETRIES = 2
Progress = Callable[[int, int], None]
T = TypeVar("T")


def call_on_worker(address: str, purpose: str, function: Callable[..., T], *arguments: object) -> T:
    """Call a function on some worker, within the limit of the stage."""
    with connect_to_workers(address, purpose) as client:
        key = f"predict-{function.__name__}-{uuid4().hex}"
        future = client.submit(function, *arguments, key=key, pure=False)
        try:
            result: T = future.result(timeout=deadline.seconds_left())
        except TimeoutError:
            future.cancel()
            deadline.check()  # or it was the worker's own
            raise
        return result


def predict_parts(address: str, parts: Sequence[Part], settings: Settings, on_progress: Progress) -> list[PartRecord]:
    """Have every part predicted by some worker; their records in order of completion. Finished parts stay on errors."""
    records: list[PartRecord] = []
    done, total = 0, sum(len(part.images.samples) for part in parts)
    with connect_to_workers(address, "prediction") as client:

        def submit(part: Part) -> Future[PartRecord]:
            key = f"predict-{part.number}-{uuid4().hex}"
            return client.submit(predict_part, part, settings, key=key, pure=False, retries=RETRIES)

        with closing(iter_results(client, parts, submit)) as completed:
            for record in completed:
                records.append(record)
                done += record.num_samples + record.num_rejected
                on_progress(done, total)
    return records
