"""The data stage as a Prefect task."""

from pathlib import Path

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from paceline.conf.data import Data
from paceline.tasks import deadline
from paceline.tasks.data.partitions import list_on
from paceline.tasks.data.prepare import dask_graph as graph
from paceline.tasks.data.prepare.storage import choose_storage
from paceline.tasks.data.sources import registry as source
from paceline.tasks.progress import progress_of_samples
from paceline.tasks.records.data import PreparedSet
from paceline.tasks.redact import redact_errors


@task(name="prepare", cache_policy=NO_CACHE)
@redact_errors
def prepare(
    data: Data, home: str, address: str, seconds: float | None = None, check_content: bool = False
) -> PreparedSet:
    """Prepare the data on Dask, or find it prepared; errors as in `dask_graph.prepare`, or TimeLimitError."""
    logger = get_run_logger()
    with deadline.time_limit("limits.prepare_seconds", seconds), progress_of_samples("prepare", logger.info) as show:
        with list_on(address):
            listing = deadline.within(lambda: source.list_samples(data))
        storage = choose_storage(listing, data, Path(home).resolve())
        logger.info("data.storage=%s: %s", storage.value, storage.reason)
        data = data.model_copy(update={"storage": storage.value})
        prepared = graph.prepare(listing, data, Path(home), address, show, check_content=check_content)
    counts = f"{prepared.num_train} train, {prepared.num_validation} validation, {prepared.num_test} test"
    if prepared.reused:
        logger.info("Reused prepared set %s (%s): %s", prepared.fingerprint, prepared.path, counts)
    else:
        rate = listing.num_samples / max(prepared.seconds, 1e-9)
        text = "Prepared set %s in %.1f s (%.0f samples/s): %s"
        logger.info(text, prepared.fingerprint, prepared.seconds, rate, counts)
        if prepared.reads.summary:
            logger.info("Read from %s: %s", data.root, prepared.reads.summary)
    if prepared.num_rejected:
        logger.warning("%d samples were rejected; see %s/rejected.jsonl", prepared.num_rejected, prepared.path)
    if prepared.ignored:
        logger.info("Ignored files by suffix: %s", prepared.ignored)
    return prepared
