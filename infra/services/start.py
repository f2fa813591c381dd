"""Starts a set, or what of it does not run; and ends it. What runs and is well is left alone."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path

from infra.services.archive import dump_databases
from infra.services.daemon import Daemon, wait_until
from infra.services.home import PRIVATE, Home, Settings, is_free, write_privately
from infra.services.postgres import Postgres
from infra.services.servers import Servers, Service
from paceline.conf.environment import Environment
from paceline.tasks.errors import InputError, RunError
from paceline.tasks.redact import redact

CERTIFICATES = Path(__file__).parents[1] / "certificates"
NAMES = ("prefect", "mlflow", "scheduler", "workers")
START_SECONDS, END_SECONDS = 300.0, 20.0
FREE_SECONDS = 5.0  # for a port: the threads of a process that was killed let go of it one by one
MIGRATED = ("prefect", "mlflow")  # packages with databases, which a new version may want changed
MLFLOW_UPGRADE = "import os; from mlflow.db import upgrade; upgrade.callback(os.environ['MLFLOW_BACKEND_STORE_URI'])"
"""`mlflow db upgrade` takes the address, password included, on its command line only."""
Say = Callable[[str], None]


def up(home: Home, settings: Settings, site: Environment, say: Say) -> Servers:
    """Start what does not run, and wait until all are well.

    Raises:
        InputError: settings do not fit what runs, or a port is taken.
        RunError: a service did not come up; its last words are in the message.
    """
    _check_settings(home, settings)
    home.make()
    home.keep(settings)
    home.vault.fill()
    if not home.tls.exists():
        made = subprocess.run([CERTIFICATES, home.tls], stdout=subprocess.DEVNULL, check=False)
        if made.returncode != 0:
            raise InputError("infra/certificates failed, as it says above; install openssl, and call infra/up again")
    postgres = Postgres(home, settings.ports["postgres"])
    _start(postgres, say)
    postgres.daemon.wait(postgres.check, START_SECONDS)
    postgres.open_databases()
    servers = Servers(home, settings, postgres, site)
    services = servers.all()
    home.keep(settings.model_copy(update={"versions": _migrate(home, settings, servers, postgres, say)}))
    started = {each.daemon.name for each in services if _start(each, say)}
    for service in services:
        if service.daemon.name == "workers" and "scheduler" in started and "workers" not in started:
            service.daemon.end(signal.SIGTERM, END_SECONDS)  # they are another scheduler's
            _start(service, say)
        service.daemon.wait(service.check, START_SECONDS)
    variables = servers.client_environment().items()
    write_privately(home.environment, "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables))
    return servers


def down(home: Home) -> list[str]:
    """End all that was started, the data left as it is; the names of what ran."""
    daemons = [Daemon(name, home) for name in reversed(NAMES)]
    ran = [daemon.name for daemon in daemons if daemon.ask(signal.SIGTERM)]  # all at once: each takes seconds
    for daemon in daemons:
        daemon.end(signal.SIGTERM, END_SECONDS)
    if Postgres(home, home.settings().ports["postgres"]).end():
        ran.append("postgres")
    return ran


def running(home: Home) -> list[str]:
    """The names of the services that run."""
    return [name for name in ("postgres", *NAMES) if Daemon(name, home).pid() is not None]


def _check_settings(home: Home, settings: Settings) -> None:
    if not home.is_made or not (running_services := running(home)):
        return
    old = home.settings()
    if (old.host, old.ports, old.num_workers) != (settings.host, settings.ports, settings.num_workers):
        raise InputError(
            f"--host, --port or --workers differ from those of {', '.join(running_services)} of {home.root}, "
            "which run; infra/down first"
        )


def _start(service: Service | Postgres, say: Say) -> bool:
    """Start a service unless it runs; whether it was started."""
    daemon = service.daemon
    if (pid := daemon.pid()) is not None:
        say(f"{daemon.name} runs already (process {pid})")
        return False
    daemon.end(signal.SIGKILL, END_SECONDS)  # what it has left behind may hold its port
    for setting, host, port in service.ports:
        if not wait_until(partial(is_free, port, host), FREE_SECONDS):
            raise InputError(
                f"port {port} on {host} is in use, and {daemon.name} needs it; stop its process, or "
                f"choose another: infra/up --port {setting}=NUMBER"
            )
    service.start()
    say(f"{daemon.name} started (process {daemon.pid()})")
    return True


def _migrate(home: Home, settings: Settings, servers: Servers, postgres: Postgres, say: Say) -> dict[str, str]:
    """Bring the databases to the installed versions, where they are of others; those versions."""
    now = {name: metadata.version(name) for name in MIGRATED}
    if settings.versions == now:
        return now
    if settings.versions:
        place = home.root / "backups"
        place.mkdir(mode=PRIVATE, exist_ok=True)
        was = "-".join(f"{name}-{version}" for name, version in settings.versions.items())
        dumps = place / f"{was}-{time.strftime('%Y%m%dT%H%M%S')}"
        dump_databases(postgres, dumps)
        say(f"the databases are of {was}, and are migrated; as they were, they are in {dumps}")
        for name in MIGRATED:  # a server of the old version must not run meanwhile
            Daemon(name, home).end(signal.SIGTERM, END_SECONDS)
        _run("mlflow db upgrade", ["-c", MLFLOW_UPGRADE], servers.mlflow_environment())
    arguments = ["-m", "prefect", "server", "database", "upgrade", "-y"]
    _run("prefect server database upgrade", arguments, servers.prefect_environment())
    return now


def _run(name: str, arguments: list[str], environment: Mapping[str, str]) -> None:
    command = [sys.executable, "-P", *arguments]
    done = subprocess.run(command, env=dict(environment), cwd="/", capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RunError(
            f"{name} failed; the databases are as they were before or half way:\n{redact(done.stderr[-2000:])}"
        )
