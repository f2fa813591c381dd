"""Deployments: a run that Prefect starts by schedule, as a form in its UI, with one policy for runs that overlap."""

from __future__ import annotations

import asyncio
import signal
import zoneinfo
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
from prefect.deployments.runner import RunnerDeployment
from prefect.runner import Runner
from prefect.schedules import Cron, Schedule
from prefect.types.entrypoint import EntrypointType

from paceline.conf.config import Config, Overlap
from paceline.conf.environment import Environment
from paceline.flows.lifecycle.outage import set_right
from paceline.flows.lifecycle.overlap import POLICY_TAG
from paceline.flows.lifecycle.patient_runner import PatientRunner
from paceline.flows.run.flow import run_pipeline
from paceline.tasks.errors import InputError

POLL_SECONDS = 0.1
SET_RIGHT_SECONDS = 60.0
"""Between two looks for runs that have lost their process, and slots that have lost their run."""


def schedule_of(cron: str, timezone: str) -> Schedule:
    """A schedule in a time zone, which follows its summer time.

    Args:
        cron: five fields, such as "0 2 * * *".
        timezone: name in the IANA data base, such as "Europe/Zurich".

    Raises:
        InputError: either is not what it should be.
    """
    if timezone not in zoneinfo.available_timezones():
        raise InputError(f"--timezone {timezone} is no time zone; use a name such as Europe/Zurich or UTC")
    try:
        return Cron(cron, timezone=timezone)
    except ValueError as error:
        raise InputError(
            f'--cron "{cron}" is no schedule (minute hour day month weekday); use such as "0 2 * * *", every night at 2'
        ) from error


def local_timezone() -> str:
    """The name of this machine's time zone; UTC where it says none."""
    named = Path("/etc/timezone")
    candidates = [named.read_text(encoding="utf-8").strip()] if named.is_file() else []
    link = Path("/etc/localtime")
    if link.is_symlink():
        candidates.append(str(link.readlink()).partition("zoneinfo/")[2])
    known = zoneinfo.available_timezones()
    return next((name for name in candidates if name in known), "UTC")


def deployment_of(config: Config, name: str, schedule: Schedule, overlap: Overlap) -> RunnerDeployment:
    """The deployment of a run: its settings are the parameters of the form, with the preset's values.

    Args:
        config: of its runs.
        name: of the deployment.
        schedule: when they start.
        overlap: what becomes of a run whose predecessor has not ended. `queue`: it waits; `skip`: it is cancelled and
            says why; `cancel-oldest`: the predecessor is.
    """
    limit = None
    if overlap != "cancel-oldest":
        strategy = ConcurrencyLimitStrategy.ENQUEUE if overlap == "queue" else ConcurrencyLimitStrategy.CANCEL_NEW
        limit = ConcurrencyLimitConfig(limit=1, collision_strategy=strategy)
    deployment = run_pipeline.to_deployment(
        name,
        schedule=schedule,
        parameters={"config": config.model_dump(mode="json")},
        concurrency_limit=limit,
        tags=["paceline", f"{POLICY_TAG}{overlap}"],
        description=f"paceline {config.name}: prepare, train, evaluate, account. Overlap: {overlap}.",
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    assert isinstance(deployment, RunnerDeployment), "not in an event loop"
    return deployment


def serve(deployment: RunnerDeployment, *, catch_up: bool) -> None:
    """Start a deployment's runs until SIGTERM or Ctrl-C, which cancel what runs.

    Args:
        deployment: of which this process is the server.
        catch_up: leave the schedule on at the end, so that what comes due is started when it is served again.
    """
    asyncio.run(_serve(deployment, pause_at_end=not catch_up))


async def _serve(deployment: RunnerDeployment, *, pause_at_end: bool) -> None:
    runner = PatientRunner(pause_on_shutdown=pause_at_end)
    stopping = _stop_on_signals(runner)
    deployment_id = await runner.aadd_deployment(deployment)
    clean_up = partial(asyncio.to_thread, set_right, Environment(), str(deployment_id))
    await clean_up()  # before a run is started, which `skip` would cancel for a slot that a lost run holds
    cleaning = asyncio.create_task(_repeat(clean_up))
    await runner.start()
    cleaning.cancel()
    await asyncio.gather(*stopping)


def _stop_on_signals(runner: Runner) -> set[asyncio.Task[None]]:
    """Stop a runner at SIGTERM or Ctrl-C; what does so will be in the set."""
    loop = asyncio.get_running_loop()
    stopping: set[asyncio.Task[None]] = set()

    async def end() -> None:
        while not runner.started:  # it cannot be stopped before, and would then go on
            await asyncio.sleep(POLL_SECONDS)
        await runner.astop()

    def begin_end() -> None:
        if not stopping:
            stopping.add(loop.create_task(end()))

    def stop(*_: object) -> None:
        loop.call_soon_threadsafe(begin_end)

    # Prefect's own handler leaves the event loop at once, and what runs to itself, RUNNING for ever (3.8.8).
    runner.handle_sigterm = stop  # type: ignore[method-assign]
    signal.signal(signal.SIGTERM, stop)  # the deployment can be seen, and somebody want its end, before Prefect does so
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, stop)
    return stopping


async def _repeat(clean_up: Callable[[], Awaitable[None]]) -> None:
    while True:
        await asyncio.sleep(SET_RIGHT_SECONDS)
        await clean_up()
