"""The account stage as a Prefect task: judges the probe and logs the verdict."""

import logging

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from paceline.tasks.records.measurement import FurtherStarts
from paceline.tasks.records.training import Trained
from paceline.tasks.redact import redact_errors
from paceline.tasks.speedup.records import SpeedupResult
from paceline.tasks.speedup.verdict import speedup_result


@task(name="account", cache_policy=NO_CACHE)
@redact_errors
def account(
    train: Trained,
    num_cores: int | None = None,
    earlier: tuple[float, ...] = (),
    starts: FurtherStarts | None = None,
) -> SpeedupResult:
    """Judge how much faster the run was than its baseline, and why."""
    log = get_run_logger()
    result = speedup_result(train.probe, train, num_cores, earlier, starts)
    is_doubtful = result.contaminated or result.cause == "too few rounds"
    log.log(logging.WARNING if is_doubtful else logging.INFO, "%s", result.verdict)
    if result.efficiency is not None:
        log.info("Parallel efficiency %.2f on %d devices", result.efficiency, train.world_size)
    return result
