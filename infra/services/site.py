"""The services of a site as `services.yaml` declares them, with the facts and secrets of the site filled in."""

import json
import os
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Iterable
from functools import cache, cached_property
from pathlib import Path
from string import Template
from typing import Any

import yaml
from pydantic import Field

from infra.services import postgres
from infra.services.home import LOOPBACK, Home, Settings, is_free, write_privately
from paceline.conf.environment import QUIET_ENVIRONMENT
from paceline.conf.load import DASK_SETTINGS
from paceline.tasks.cluster.hardware import describe, usable_cores
from paceline.tasks.errors import InputError
from paceline.tasks.http import ask, status
from paceline.tasks.records.record import Record

DECLARATION = Path(__file__).with_name("services.yaml")
CLIENT = "x-client"
REFUSED, UNKNOWN = 401, 404
HTTPS = 443
GPU_OPTIONS = "$gpu_options"  # the one fact that is several words
FOREIGN_PREFIXES = ("PREFECT_", "MLFLOW_")
SYSTEM_FOLDERS = ("/usr/sbin", "/sbin")
"""Where Debian has programs of services; a user's PATH may lack them."""
INSTANCE = re.compile(r"[A-Za-z0-9][\w-]*")


def _system_program(name: str) -> str:
    program = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), *SYSTEM_FOLDERS]))
    if program is None:
        raise InputError(f"{name} is not installed; on Debian, as root: apt-get install {name}")
    return program


class Health(Record):
    """When a service is well: the URL answers and, with `count`, that number in the answer is the number of workers."""

    url: str
    user: str | None = None
    count: str | None = None


class Service(Record):
    """One service; the fields are explained at the head of `services.yaml`."""

    name: str
    about: str
    command: tuple[str, ...]
    environment: dict[str, str] = Field(default_factory=dict)
    ports: dict[str, str] = Field(default_factory=dict)
    requires: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    files: dict[str, str] = Field(default_factory=dict)
    health: Health | None = None
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    once: bool = False
    each: str | None = None
    when: str | None = None
    devices: bool = False
    reload_signal: str | None = None
    stop_signal: str = "SIGTERM"
    stop_seconds: float = 20.0


class Site:
    """All services of a home, by its settings, and the PACELINE_HOME of the runs."""

    def __init__(self, home: Home, settings: Settings, paceline_home: Path) -> None:
        self.home, self.settings, self.paceline_home = home, settings, paceline_home
        self.postgres = postgres.Postgres(home, settings.ports["postgres"])
        self.services = tuple(self._read())

    def __getitem__(self, name: str) -> Service:
        """A service by its name. Raises InputError: there is none."""
        services = {service.name: service for service in self.services}
        if name not in services:
            raise InputError(f"{name} is no service of {self.home.root}; use one of {', '.join(services)}")
        return services[name]

    @property
    def num_workers(self) -> int:
        """Number of Dask workers: as configured, else one per GPU, or per core without GPUs."""
        return self.settings.num_workers or len(describe().gpus) or usable_cores()

    @cached_property
    def facts(self) -> dict[str, str]:
        """What `$NAME` in the declaration stands for, secrets aside."""
        host, ports, domain = self.settings.host, self.settings.ports, self.settings.domain
        addresses = {name: f"{host}:{ports[name]}" for name in ("prefect", "mlflow")}
        pages = {name: f"http://{address}" for name, address in addresses.items()}
        names = dict.fromkeys(pages, "localhost")
        gpus = ",".join(gpu.uuid for gpu in describe().gpus[: self.num_workers])
        if domain is not None:
            port = "" if ports["proxy"] == HTTPS else f":{ports['proxy']}"
            names = {name: f"{name}.{domain}" for name in pages}
            pages = {name: f"https://{names[name]}{port}" for name in pages}
        return {
            "home": str(self.home.root),
            "paceline_home": str(self.paceline_home),
            "python": sys.executable,
            "dask_config": str(DASK_SETTINGS),
            "host": host,
            "own_host": host if is_free(0, host) else _outgoing(host),
            "num_workers": str(self.num_workers),
            "gpus": gpus,
            "gpu_options": "--preload-nanny paceline.tasks.cluster.gpu_workers" if gpus else "",
            **{f"{name}_port": str(port) for name, port in ports.items()},
            "prefect_url": f"http://{addresses['prefect']}/api",
            "mlflow_url": f"http://{addresses['mlflow']}",
            "scheduler_url": f"tls://{host}:{ports['scheduler']}",
            **{f"{name}_name": text for name, text in names.items()},
            **{f"{name}_page": text for name, text in pages.items()},
            **{name: str(getattr(self.settings, name)) for name in ("pool", "backups", "keep")},
        }

    def command(self, service: Service) -> list[str]:
        """The command line of a service, without secrets."""
        filled = [(part, Template(part).substitute(self.facts)) for part in service.command]
        words = [word for part, text in filled for word in (text.split() if part == GPU_OPTIONS else [text])]
        if words[0] == "postgres":
            words[0] = self.postgres.program("postgres")
        elif not Path(words[0]).is_absolute():
            words[0] = _system_program(words[0])
        return words

    def environment(self, service: Service) -> dict[str, str]:
        """The complete environment of a service: of the caller's variables none of other servers."""
        if service.name == "postgres":
            return postgres.environment()
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN_PREFIXES)}
        return inherited | QUIET_ENVIRONMENT | self._fill(service.environment, service.secrets)

    def client_environment(self) -> dict[str, str]:
        """Variables of a client of these services."""
        return self._fill(_tree()[CLIENT], ("prefect_password", "mlflow_password"))

    def prepare(self, service: Service) -> None:
        """Make what a service needs before its start."""
        for name, text in self._fill(service.files, service.secrets).items():
            write_privately(self.home.root / name, text)
        if service.name == "postgres":
            self.postgres.prepare()

    def check(self, service: Service) -> None:
        """Raise an error unless a service is well."""
        if service.name == "postgres":
            self.postgres.check()
        elif service.health is not None:
            filled = self._fill({"url": service.health.url, "user": service.health.user or ""}, service.secrets)
            url, user = filled["url"], filled["user"] or None
            if service.name == "mlflow" and status(url, user) == REFUSED:
                self._make_mlflow_user()
            answer = ask(url, user)
            if not answer:
                raise OSError(f"{url} gives an empty answer")
            if service.health.count and (count := json.loads(answer)[service.health.count]) < self.num_workers:
                raise OSError(f"{count} of {self.num_workers} {service.health.count} have come")

    def _make_mlflow_user(self) -> None:
        """Make the user that logs runs, unless it exists: runs are not logged as the administrator."""
        admin = f"admin:{self.home.secret('mlflow_admin_password')}"
        users = f"{self.facts['mlflow_url']}/api/2.0/mlflow/users"
        if status(f"{users}/get?username=paceline", admin) == UNKNOWN:
            body = {"username": "paceline", "password": self.home.secret("mlflow_password")}
            ask(f"{users}/create", admin, body)

    def _fill(self, texts: dict[str, str], secrets: Iterable[str]) -> dict[str, str]:
        values = self.facts | {name: self.home.secret(name) for name in secrets}
        return {name: Template(text).substitute(values) for name, text in texts.items()}

    def _read(self) -> Iterable[Service]:
        backups = self.settings.backups or ""
        for service in declared().values():
            if service.each is not None:
                yield from (_instance(service, path) for path in sorted((self.home.root / service.each).glob("[!.]*")))
            elif service.when is None or getattr(self.settings, service.when):
                writes = tuple(name.replace("$backups", backups) for name in service.writes)
                yield service.model_copy(update={"writes": writes})


@cache
def _tree() -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load(DECLARATION.read_text(encoding="utf-8"))
    return tree


def declared() -> dict[str, Service]:
    """All services of the declaration, by name."""
    return {name: Service(name=name, **fields) for name, fields in _tree().items() if not name.startswith("x-")}


def _instance(service: Service, path: Path) -> Service:
    """A service of one file. Raises InputError: its name does not fit, or its text is no list of arguments."""
    if not INSTANCE.fullmatch(path.name):
        raise InputError(f"{path}: a name has letters, digits, _ and - only; rename the file")
    try:
        arguments = [part.replace("$", "$$") for part in shlex.split(path.read_text(encoding="utf-8"), comments=True)]
    except ValueError as error:
        raise InputError(f"{path} is no list of arguments ({error}); close its quotes") from error
    command: list[Any] = []
    for part in service.command:
        command += arguments if part == "$arguments" else [part.replace("$each", path.name)]
    return service.model_copy(update={"name": f"{service.name}-{path.name}", "command": tuple(command)})


def _outgoing(host: str) -> str:
    """The address of this host on its way to another one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 1))
        except OSError:  # the name is not known here
            return LOOPBACK
        return str(probe.getsockname()[0])


def check_workers(settings: Settings) -> None:
    """Check that this host can run the configured number of workers. Raises InputError: it cannot."""
    num_workers, gpus = settings.num_workers or 0, describe().gpus
    if num_workers < 0:
        raise InputError(f"--workers {num_workers}; give how many, or 0 for as many as fit")
    if gpus and num_workers > len(gpus):
        raise InputError(f"--workers {num_workers}, and this host has {len(gpus)} GPUs; each has one worker")
