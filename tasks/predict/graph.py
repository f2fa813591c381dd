"""Prediction on Dask: parts that are there are left alone, the others go to the workers.

The only module of this stage that imports dask. Neither pixels nor predictions pass through the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from uuid import uuid4

from tasks.cluster.window import completed, connect_to_workers
from tasks.errors import PacelineError, RunError
from tasks.predict.job import Parity, Part, PartRecord, Settings
from tasks.predict.part import check_parity, predict_part

if TYPE_CHECKING:
    from distributed import Client, Future

RETRIES = 2
Progress = Callable[[int, int], None]


def parity_on_worker(address: str, part: Part, settings: Settings) -> Parity | None:
    """The model as it is executed against the plain one, on a part's images; None if none can be read.

    Raises:
        RunError: the worker cannot do it.
    """
    try:
        with connect_to_workers(address, "prediction") as client:
            return client.submit(check_parity, part, settings, key=_key("parity"), pure=False).result()
    except (PacelineError, OSError):
        raise
    except Exception as error:
        raise RunError(f"prediction of the first images failed: {_one_line(error)}") from error


def predict_parts(
    address: str, parts: Sequence[Part], settings: Settings, on_progress: Progress | None = None
) -> list[PartRecord]:
    """Have every part predicted by some worker; their records in order of completion.

    Raises:
        RunError: the cluster has no workers, or a part failed for good; parts that are done stay.
    """
    records: list[PartRecord] = []
    total = sum(len(part.samples) for part in parts)

    def submit(part: Part) -> Future[PartRecord]:
        key = _key(str(part.number))
        return client.submit(predict_part, part, settings, key=key, pure=False, retries=RETRIES)

    client: Client
    try:
        with connect_to_workers(address, "prediction") as client:
            for record in completed(client, parts, submit):
                records.append(record)
                if on_progress is not None:
                    on_progress(sum(done.num_samples + done.num_rejected for done in records), total)
    except (PacelineError, OSError):
        raise
    except Exception as error:
        raise RunError(f"prediction failed on the workers at {address}: {_one_line(error)}") from error
    return records


def _key(what: str) -> str:
    return f"predict-{what}-{uuid4().hex}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__
