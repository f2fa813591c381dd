"""Guards flows against signals, failing stages and outages of Prefect's API, and shows their results in its UI."""

import html
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import wraps
from http import HTTPStatus
from typing import Any, ParamSpec, TypeVar
from uuid import UUID

import httpx
from prefect import Task, get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.concurrency import _leases
from prefect.exceptions import PrefectHTTPStatusError
from prefect.logging import get_logger, handlers
from prefect.runtime import deployment, flow_run

from paceline.conf.config import Limits
from paceline.conf.environment import Environment, quieten
from paceline.flows.lifecycle.flow_run_lock import flow_run_lock, set_right
from paceline.flows.lifecycle.guardian import guard
from paceline.flows.lifecycle.missed_runs import report_late_and_missed_runs
from paceline.flows.lifecycle.prefect_api import wait_for_api
from paceline.flows.lifecycle.signals import is_interruption, stop_on_signal
from paceline.tasks.errors import InputError, is_transient
from paceline.tasks.redact import redact_errors

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

LEASE_SECONDS = 1800.0  # duration of a renewed lease: a shorter outage loses no slot
LEASE_RETRY_SECONDS = 10.0
_SPECIAL = re.compile(r"([\\`|\[\]])")
ENGINE = "prefect.engine"  # the program that a runner or a worker starts for one flow run


def guard_flow(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Make a flow stop on signals, redact its errors, lock its run, clean up after lost runs, and outlive outages.

    It waits at its end until Prefect answers. The decorator changes the renewal of leases and the log, and locks the
    run of this process at once: Prefect starts them before it calls the function.
    """
    redacted = redact_errors(function)
    _leases._lease_renewal_loop = _renew_while_running
    handlers.Console.on_broken_pipe = _continue_unread  # type: ignore[attr-defined, assignment]
    if ENGINE in sys.orig_argv:
        with suppress(InputError):  # raised again when the flow is called
            _own()

    @stop_on_signal
    @wraps(redacted)  # Prefect reads the signature that `redact_errors` sets
    def call(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        quieten()
        _own()
        wait_for_api()
        deployment_id = deployment.get_id()
        set_right(Environment(), deployment_id)
        if deployment_id is not None:
            report_late_and_missed_runs()
        try:
            result = redacted(*arguments, **options)
        except Exception as error:
            if not is_interruption(error):
                wait_for_api()
            raise
        wait_for_api()
        return result

    return call


def with_retries(stage: Task[Arguments, Result], limits: Limits) -> Task[Arguments, Result]:
    """Give a stage the retries of `limits`, for transient errors only."""
    return stage.with_options(
        retries=limits.retries,
        retry_delay_seconds=limits.retry_delay_seconds,
        retry_condition_fn=lambda stage, run, state: is_transient(state.data),
    )


def _continue_unread(console: Any) -> None:
    """Continue without a log when its reader has ended, for example because `paceline serve` was killed.

    Rich's default ends the process, or the event loop if a Dask client's thread writes the line.
    """
    console.quiet = True
    with suppress(OSError, ValueError):  # not a file, or a closed one
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, console.file.fileno())
        os.close(nowhere)


def _renew_while_running(lease_id: UUID, lease_duration: float, stop_event: threading.Event) -> None:
    """Renew a flow run's concurrency lease, in the thread that Prefect starts for it, also after an outage of its API.

    Prefect 3.8.8 renews the lease of a deployment's run every 225 s for 300 s more, and cancels the flow when that
    fails three times (`raise_on_lease_renewal_failure` in `prefect/flow_engine.py`; no setting changes it). A training
    without a lease does no harm: `tasks/train/launch/device_lock.py` prevents two trainings on one device.
    """
    is_away = False
    while not stop_event.is_set():
        try:
            with get_client(sync_client=True) as client:
                client.renew_concurrency_lease(lease_id=lease_id, lease_duration=LEASE_SECONDS)
        except Exception as error:  # noqa: BLE001  no error of the renewal may end a training
            if isinstance(error, PrefectHTTPStatusError) and error.response.status_code == HTTPStatus.GONE:
                get_run_logger().warning(
                    "Prefect does not know this run's concurrency lease any more, as after a restart of its server; "
                    "the run continues without"
                )
                return
            if not is_away:
                get_run_logger().warning(
                    "Prefect's API did not renew this run's concurrency lease (%s); the run continues, and tries again",
                    error,
                )
            is_away = True
            stop_event.wait(LEASE_RETRY_SECONDS)
        else:
            is_away = False
            stop_event.wait(lease_duration * _leases._RENEWAL_FRACTION)


def _own() -> None:
    environment, mine = Environment(), flow_run.get_id()
    if mine is None:
        return
    try:
        guard(flow_run_lock(environment, UUID(mine)))
    except OSError as error:  # the run itself reports more
        get_logger("paceline").warning("This run cannot be recorded in %s (%s)", environment.root, error)


def report(create: Callable[..., object], **arguments: Any) -> None:
    """Call a function of `prefect.artifacts` once the API answers; log a failure."""
    wait_for_api()
    try:
        create(**arguments, _sync=True)  # else it returns a coroutine in an asynchronous flow
    except httpx.HTTPError as error:
        get_run_logger().warning("Prefect has not taken %r (%s)", arguments["description"], error)


def plain(value: object) -> str:
    """Escape markup, links, code and line ends, for Markdown with names of classes, files and runs."""
    return _SPECIAL.sub(r"\\\1", html.escape(" ".join(str(value).split()), quote=False))


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *([plain(value) for value in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def publish(rows: list[tuple[str, str]], key: str, description: str) -> None:
    """Show a short table with the flow run in the Prefect UI."""
    report(create_markdown_artifact, key=key, markdown=table(("", ""), rows), description=description)
