"""Retries for stages that fail for transient reasons."""

from typing import ParamSpec, TypeVar

from prefect import Task

from paceline.conf.config import Limits
from paceline.tasks.errors import is_transient

P = ParamSpec("P")
R = TypeVar("R")


def with_retries(stage: Task[P, R], limits: Limits) -> Task[P, R]:
    """Give a stage the retries of `limits`, for transient errors only."""
    return stage.with_options(
        retries=limits.retries,
        retry_delay_seconds=limits.retry_delay_seconds,
        retry_condition_fn=lambda stage, run, state: is_transient(state.data),
    )
