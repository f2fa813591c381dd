"""The data stage as a Prefect task. Knows when, not how."""

from __future__ import annotations

from pathlib import Path

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from conf.schema import Data
from tasks.data import graph, source
from tasks.display import progress_of_samples
from tasks.records import PreparedSet
from tasks.redact import discreet


@task(name="prepare", cache_policy=NO_CACHE)
@discreet
def prepare(data: Data, home: str, address: str) -> PreparedSet:
    """Prepare the data on Dask, or find it prepared.

    Args:
        data: What is learned from.
        home: State directory, seen by all workers under the same path.
        address: Of the Dask scheduler.

    Raises:
        InputError: The data cannot be used; nothing was published.
        RunError: The cluster or the disk failed.
    """
    logger = get_run_logger()
    listing = source.list_samples(data)
    with progress_of_samples("prepare", logger.info) as show:
        prepared = graph.prepare(listing, data, Path(home), address, show, logger.warning)
    counts = f"{prepared.num_train} train, {prepared.num_validation} validation, {prepared.num_test} test"
    if prepared.reused:
        logger.info("Reused prepared set %s (%s): %s", prepared.fingerprint, prepared.path, counts)
    else:
        rate = listing.num_samples / max(prepared.seconds, 1e-9)
        logger.info(
            "Prepared set %s in %.1f s (%.0f samples/s): %s", prepared.fingerprint, prepared.seconds, rate, counts
        )
    if prepared.num_rejected:
        logger.warning("%d samples were rejected; see %s/rejected.jsonl", prepared.num_rejected, prepared.path)
    if prepared.ignored:
        logger.info("Ignored files by suffix: %s", prepared.ignored)
    return prepared
