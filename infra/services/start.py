"""Starts a set, or what of it does not run; and ends it. What runs and is well is left alone."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path

import psutil

from infra.services import postgres
from infra.services.daemon import MARK, Daemon, wait_until
from infra.services.home import PRIVATE, Home, is_free, write_privately
from infra.services.site import Service, Site, declared
from paceline.tasks.errors import InputError, RunError
from paceline.tasks.redact import redact

CERTIFICATES = Path(__file__).parents[1] / "certificates"
START_SECONDS, END_SECONDS = 300.0, 20.0
FREE_SECONDS = 5.0  # for a port: the threads of a process that was killed let go of it one by one
MIGRATED = ("prefect", "mlflow")  # packages with databases, which a new version may want changed
MLFLOW_UPGRADE = "import os; from mlflow.db import upgrade; upgrade.callback(os.environ['MLFLOW_BACKEND_STORE_URI'])"
"""`mlflow db upgrade` takes the address, password included, on its command line only."""
Say = Callable[[str], None]


def make(site: Site) -> None:
    """Make a home with its settings, secrets and certificates, as far as they are not there yet."""
    home = site.home
    home.make()
    home.keep(site.settings)
    home.make_secrets()
    if not home.tls.exists():
        made = subprocess.run([CERTIFICATES, home.tls], stdout=subprocess.DEVNULL, check=False)
        if made.returncode != 0:
            raise InputError("infra/certificates failed, as it says above; install openssl, and call infra/up again")
    for name in dict.fromkeys(name for service in site.services for name in service.writes):
        home.make_private(name)
    variables = site.client_environment().items()
    write_privately(home.environment, "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables))


def up(site: Site, say: Say) -> None:
    """Start what does not run, and wait until all are well.

    Raises InputError: settings do not fit what runs, or a port is taken. Raises RunError: a service did not come up;
    its last words are in the message.
    """
    _check_settings(site)
    make(site)
    home = site.home
    started: set[str] = set()
    well: set[str] = set()
    for service in site.services:
        for required in service.requires:
            if required not in well:
                wait(site, site[required])
                well.add(required)
        if service.once:
            migrate(site, say)
            well.add(service.name)
            continue
        if service.name == "workers" and "scheduler" in started:
            Daemon("workers", site.home).end(signal.SIGTERM, END_SECONDS)  # they are another scheduler's
        if start(site, service, say):
            started.add(service.name)
    for name in {path.stem for path in home.pids.glob("*.json")} - {service.name for service in site.services}:
        say(f"{name} is no service any more, and is ended")
        Daemon(name, home).end(signal.SIGTERM, declared()["serve"].stop_seconds)
    for service in site.services:
        if service.name not in well:
            wait(site, service)


def down(home: Home) -> list[str]:
    """End all that was started, the data left as it is; the names of what ran."""
    services, names = declared(), sorted((path.stem for path in home.pids.glob("*.json")), key="postgres".__eq__)
    # All at once, since each takes seconds. PostgreSQL comes last.
    ran = {name for name in names if name != "postgres" and Daemon(name, home).ask(signal.SIGTERM)}
    for name in names:
        service = services.get(name.partition("-")[0], services["serve"])
        if Daemon(name, home).end(signal.Signals[service.stop_signal], service.stop_seconds):
            ran.add(name)
    return [name for name in names if name in ran]


def running(home: Home) -> list[str]:
    """The names of the services that run."""
    names = [path.stem for path in sorted(home.pids.glob("*.json")) if Daemon(path.stem, home).pid() is not None]
    by_others = not names and home.is_made and postgres.Postgres(home, home.settings().ports["postgres"]).runs
    return names or (["postgres"] if by_others else [])


def check_idle(home: Home, paceline_home: Path) -> None:
    """Check that only the services of a home use PACELINE_HOME. Raises InputError: a run or another program does."""
    ancestors = {process.pid for process in psutil.Process().parents()} | {os.getpid()}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words, variables = process.cmdline(), process.environ()
            is_paceline = any(word.startswith("paceline.") or Path(word).name == "paceline" for word in words[:6])
            place = Path(process.cwd(), variables.get("PACELINE_HOME") or ".paceline")
            is_service = variables.get(MARK, "").startswith(f"{home.root}#")
            if is_paceline and place == paceline_home and not is_service and process.pid not in ancestors:
                raise InputError(f"process {process.pid} ({' '.join(words[-4:])}) uses {paceline_home}; stop it first")


def start(site: Site, service: Service, say: Say) -> bool:
    """Start a service unless it runs; whether it was started."""
    daemon = Daemon(service.name, site.home)
    if (pid := daemon.pid()) is not None:
        if service.reload_signal is not None:
            daemon.ask(signal.Signals[service.reload_signal])
        say(f"{service.name} runs already (process {pid})")
        return False
    daemon.end(signal.SIGKILL, END_SECONDS)  # what it has left behind may hold its port
    for name, address in service.ports.items():
        host, port = address.replace("$host", site.settings.host), site.settings.ports[name]
        if not wait_until(partial(is_free, port, host), FREE_SECONDS):
            fault = f"port {port} on {host} is in use, and {service.name} needs it"
            raise InputError(f"{fault}; stop its process, or choose another: infra/up --port {name}=NUMBER")
    site.prepare(service)
    user = postgres.user() if service.name == "postgres" else None
    daemon.start(site.command(service), site.environment(service), Path("/"), user)
    say(f"{service.name} started (process {daemon.pid()})")
    return True


def wait(site: Site, service: Service, seconds: float = START_SECONDS) -> None:
    """Wait until a service that was started is well. Raises RunError: it ended, or is not well in time."""
    Daemon(service.name, site.home).wait(lambda: site.check(service), seconds)


def migrate(site: Site, say: Say) -> None:
    """Make roles and databases, and bring databases of other versions to the installed ones."""
    home, settings = site.home, site.settings
    site.postgres.open_databases()
    now = {name: metadata.version(name) for name in MIGRATED}
    if settings.versions == now:
        return
    if settings.versions:
        place = home.root / "backups"
        place.mkdir(mode=PRIVATE, exist_ok=True)
        was = "-".join(f"{name}-{version}" for name, version in settings.versions.items())
        dumps = place / f"{was}-{time.strftime('%Y%m%dT%H%M%S')}"
        site.postgres.dump_all(dumps)
        say(f"the databases are of {was}, and are migrated; as they were, they are in {dumps}")
        for name in MIGRATED:  # a server of the old version must not run meanwhile
            Daemon(name, home).end(signal.SIGTERM, END_SECONDS)
        _run("mlflow db upgrade", ["-c", MLFLOW_UPGRADE], site.environment(site["mlflow"]))
    arguments = ["-m", "prefect", "server", "database", "upgrade", "-y"]
    _run("prefect server database upgrade", arguments, site.environment(site["prefect"]))
    home.keep(settings.model_copy(update={"versions": now}))


def _check_settings(site: Site) -> None:
    if not site.home.is_made or not (names := running(site.home)):
        return
    old, new = site.home.settings(), site.settings
    ports_differ = any(new.ports[name] != port for name, port in old.ports.items())
    if ports_differ or (old.host, old.num_workers) != (new.host, new.num_workers):
        fault = f"--host, --port or --workers differ from those of {', '.join(names)} of {site.home.root}, which run"
        raise InputError(f"{fault}; infra/down first")


def _run(name: str, arguments: list[str], environment: Mapping[str, str]) -> None:
    command = [sys.executable, "-P", *arguments]
    done = subprocess.run(command, env=dict(environment), cwd="/", capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RunError(
            f"{name} failed; the databases are as they were before or half way:\n{redact(done.stderr[-2000:])}"
        )
