"""Stages that are tried again when something outside of them failed; Prefect shows each try."""

from __future__ import annotations

from typing import Any, ParamSpec, TypeVar

from prefect import Task

from paceline.conf.config import Limits
from paceline.tasks.errors import is_transient

P = ParamSpec("P")
R = TypeVar("R")


def with_retries(stage: Task[P, R], limits: Limits) -> Task[P, R]:
    """A stage with the further tries that `limits` gives it, for errors that may be gone the next time."""
    return stage.with_options(
        retries=limits.retries, retry_delay_seconds=limits.retry_delay_seconds, retry_condition_fn=_may_pass
    )


def _may_pass(stage: Task[Any, Any], run: object, state: Any) -> bool:
    return is_transient(state.data)
