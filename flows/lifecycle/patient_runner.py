"""A Prefect runner that survives outages of the API."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec, Self

import httpx
from prefect.logging import get_logger
from prefect.runner import Runner

Arguments = ParamSpec("Arguments")


class PatientRunner(Runner):
    """A runner that retries however long the API is away.

    Prefect 3.8.8 ends the runner and its flows when three requests in a row have failed. A larger
    PREFECT_CLIENT_MAX_RETRIES would double the client's pauses, and so wait as long again after an outage.
    """

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        poller, observer = self._scheduled_run_poller, self._cancelling_observer
        assert observer is not None
        poller._get_and_submit_flow_runs = patient(poller._get_and_submit_flow_runs)  # type: ignore[method-assign]
        observer._check_for_cancelled_flow_runs = patient(observer._check_for_cancelled_flow_runs)  # type: ignore[method-assign]
        return self


def patient(workload: Callable[Arguments, Coroutine[Any, Any, None]]) -> Callable[Arguments, Coroutine[Any, Any, None]]:
    """Log errors of the API in a repeated workload, once per outage, instead of raising them."""
    is_away = False

    @wraps(workload)
    async def call(*arguments: Arguments.args, **options: Arguments.kwargs) -> None:
        nonlocal is_away
        try:
            await workload(*arguments, **options)
        except (httpx.TransportError, httpx.HTTPStatusError) as error:
            if isinstance(error, httpx.HTTPStatusError) and not error.response.is_server_error:
                raise
            if not is_away:
                get_logger("paceline").warning("Prefect's API fails (%r); trying again until it answers", error)
            is_away = True
        else:
            if is_away:
                get_logger("paceline").info("Prefect's API answers again")
            is_away = False

    return call
