"""Deployments: runs that Prefect starts by schedule or from a form in its UI, with one overlap policy."""

import asyncio
import signal
import zoneinfo
from collections.abc import Callable, Coroutine
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import Any, Self

import httpx
from prefect import Flow
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
from prefect.deployments.runner import RunnerDeployment
from prefect.logging import get_logger
from prefect.runner import Runner
from prefect.schedules import Cron, Schedule
from prefect.types.entrypoint import EntrypointType

from paceline.conf.config import Config, Overlap
from paceline.conf.environment import Environment
from paceline.flows.clean import clean_up
from paceline.flows.lifecycle.flow_run_lock import set_right
from paceline.flows.lifecycle.missed_runs import STOPPED_TAG, report_missed_runs
from paceline.flows.lifecycle.overlap import POLICY_TAG
from paceline.flows.run.flow import run_pipeline
from paceline.flows.run.lightning import run_lightning
from paceline.tasks.errors import InputError

POLL_SECONDS = 0.1
SET_RIGHT_SECONDS = 60.0  # interval of the search for runs without a process and slots without a run


def schedule_of(cron: str, timezone: str, option: str = "--cron") -> Schedule:
    """Make a schedule from five fields, such as "0 2 * * *", in an IANA time zone, with its summer time."""
    if timezone not in zoneinfo.available_timezones():
        raise InputError(f"--timezone {timezone} is not a time zone; use a name such as Europe/Zurich or UTC")
    try:
        return Cron(cron, timezone=timezone)
    except ValueError as error:
        raise InputError(
            f'{option} "{cron}" is not a schedule (minute hour day month weekday); use "0 2 * * *" for every night at 2'
        ) from error


def local_timezone() -> str:
    """The name of this machine's time zone; UTC if it has none."""
    file, link = Path("/etc/timezone"), Path("/etc/localtime")
    candidates = [file.read_text(encoding="utf-8").strip()] if file.is_file() else []
    if link.is_symlink():
        candidates.append(str(link.readlink()).partition("zoneinfo/")[2])
    zones = zoneinfo.available_timezones()
    return next((name for name in candidates if name in zones), "UTC")


def deployment_of(config: Config | None, name: str, schedule: Schedule, overlap: Overlap) -> RunnerDeployment:
    """Make the deployment of a run, or of the clean-up without a configuration; Prefect's form has the settings.

    Those of own Lightning code are the given ones: each run reads them with the code as it is then.
    """
    work: Flow[..., Any] = run_pipeline if config else clean_up
    if config and (own := config.lightning).settings:
        given = own.model_copy(update={"settings": own.given or own.settings})
        work, config = run_lightning, config.model_copy(update={"lightning": given})
    limit = None  # with `cancel-oldest`, the run itself cancels its predecessor
    if overlap != "cancel-oldest":
        strategy = ConcurrencyLimitStrategy.ENQUEUE if overlap == "queue" else ConcurrencyLimitStrategy.CANCEL_NEW
        limit = ConcurrencyLimitConfig(limit=1, collision_strategy=strategy)
    text = f"paceline {config.name}: prepare, train, evaluate, account. Overlap: {overlap}." if config else None
    deployment = work.to_deployment(
        name,
        schedule=schedule,
        parameters={"config": config.model_dump(mode="json")} if config else {},
        concurrency_limit=limit,
        tags=["paceline", f"{POLICY_TAG}{overlap}"],
        description=text,
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    assert isinstance(deployment, RunnerDeployment), "not in an event loop"
    return deployment


class PatientRunner(Runner):
    """A runner that retries however long the API is away, and marks the deployments that it pauses at its end.

    Prefect 3.8.8 ends the runner and its flows when three requests in a row have failed. A larger
    PREFECT_CLIENT_MAX_RETRIES would double the client's pauses, and so wait as long again after an outage.
    """

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        poller, observer = self._scheduled_run_poller, self._cancelling_observer
        assert observer is not None
        poller._get_and_submit_flow_runs = _log_outages(poller._get_and_submit_flow_runs)  # type: ignore[method-assign]
        observer._check_for_cancelled_flow_runs = _log_outages(observer._check_for_cancelled_flow_runs)  # type: ignore[method-assign]
        return self

    async def _pause_schedules(self) -> None:
        """Pause the deployments, and mark those that nobody had paused: what comes due from now on is missed."""
        for deployment_id in self._deployment_registry.get_deployment_ids():
            deployed = await self._client.read_deployment(deployment_id)
            await self._client.pause_deployment(deployment_id)
            if not deployed.paused:
                marked = DeploymentUpdate(tags=[*deployed.tags, STOPPED_TAG])
                await self._client.update_deployment(deployment_id, marked)


def _log_outages(workload: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., Coroutine[Any, Any, None]]:
    """Log errors of the API in a repeated workload, once per outage, instead of raising them."""
    is_away = False

    @wraps(workload)
    async def call(*arguments: Any, **options: Any) -> None:
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


def serve(*served: RunnerDeployment, catch_up: bool) -> None:
    """Start the runs of deployments until SIGTERM or Ctrl-C, which cancel running flows.

    With `catch_up` the schedule stays on at the end, so that the next server starts missed runs.
    """

    async def start() -> None:
        runner = PatientRunner(pause_on_shutdown=not catch_up)
        stopping = _stop_on_signals(runner)
        checked_until: dict[str, datetime | None] = {}

        async def report_missed() -> None:
            for name in (deployment.full_name for deployment in served):
                checked_until[name] = await asyncio.to_thread(
                    report_missed_runs, name, checked_until.get(name), catch_up=catch_up
                )

        await report_missed()  # before the schedules are replaced
        ids = [str(await runner.aadd_deployment(deployment)) for deployment in served]

        async def set_all_right() -> None:
            for deployment_id in ids:
                await asyncio.to_thread(set_right, Environment(), deployment_id)

        await set_all_right()  # first: with `skip`, the slot of a lost run would cancel a new one

        async def repeat() -> None:
            while True:
                await asyncio.sleep(SET_RIGHT_SECONDS)
                await set_all_right()
                await report_missed()

        cleaning = asyncio.create_task(repeat())
        await runner.start()
        cleaning.cancel()
        await asyncio.gather(*stopping)

    asyncio.run(start())


def _stop_on_signals(runner: Runner) -> set[asyncio.Task[None]]:
    """Stop a runner at SIGTERM or Ctrl-C; the set then holds the task that stops it."""
    loop = asyncio.get_running_loop()
    stopping: set[asyncio.Task[None]] = set()

    async def end() -> None:
        while not runner.started:  # an earlier stop has no effect
            await asyncio.sleep(POLL_SECONDS)
        await runner.astop()

    def start_end() -> None:
        if not stopping:
            stopping.add(loop.create_task(end()))

    def stop(*_: object) -> None:
        loop.call_soon_threadsafe(start_end)

    # Prefect's own handler leaves the event loop at once, and its runs stay RUNNING for ever (3.8.8).
    runner.handle_sigterm = stop  # type: ignore[method-assign]
    signal.signal(signal.SIGTERM, stop)  # Prefect sets its own only after the deployment is visible
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, stop)
    return stopping
