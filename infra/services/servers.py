"""The services of a set: command, environment and health check of each.

Commands hold no secrets, since everybody on a host can read them; those go by environments and private files.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from infra.services.daemon import Daemon
from infra.services.home import LOOPBACK, Home, Port, Settings, write_privately
from infra.services.postgres import Postgres
from paceline.conf.environment import QUIET_ENVIRONMENT, Environment
from paceline.conf.load import DASK_SETTINGS
from paceline.tasks.cluster.hardware import describe, usable_cores
from paceline.tasks.errors import InputError
from paceline.tasks.http import ask, status

USER, ADMIN = "paceline", "admin"
MLFLOW_DRIVER = "postgresql+psycopg"  # psycopg 3, under any SQLAlchemy 2
REFUSED, UNKNOWN = 401, 404
FOREIGN_PREFIXES = ("PREFECT_", "MLFLOW_")
LEASES_ON_DISK = "prefect.server.concurrency.lease_storage.filesystem"
"""Below PREFECT_HOME. Prefect's default is its memory, and a restart would forget who holds a deployment's slots."""
AUTH_CONFIG = f"""[mlflow]
default_permission = READ
database_uri = {{uri}}
admin_username = {ADMIN}
authorization_function = mlflow.server.auth:authenticate_request_basic_auth
auth_cache_ttl_seconds = 60
"""
"""A password's hash takes MLflow 50 ms and more: cached. With its one worker process, its own changes show at once."""


@dataclass(frozen=True)
class Service:
    """One service of a set, PostgreSQL aside."""

    daemon: Daemon
    command: tuple[str, ...]
    environment: Mapping[str, str]
    ports: tuple[Port, ...]  # that it listens on
    check: Callable[[], None]  # raises while it is not well
    address: str  # to be shown

    def start(self) -> None:
        """Start its process."""
        self.daemon.start(self.command, self.environment, Path("/"))


class Servers:
    """All services of a set but PostgreSQL, which is behind Prefect and MLflow; workers share this machine's facts."""

    def __init__(self, home: Home, settings: Settings, postgres: Postgres, site: Environment) -> None:
        self._home, self._settings, self._postgres, self._site = home, settings, postgres, site
        self._vault = home.vault
        host, ports = settings.host, settings.ports
        self.prefect_url = f"http://{host}:{ports['prefect']}/api"
        self.mlflow_url = f"http://{host}:{ports['mlflow']}"
        self.scheduler_address = f"tls://{host}:{ports['scheduler']}"
        self._dashboard = f"http://{LOOPBACK}:{ports['dashboard']}"

    def all(self) -> list[Service]:
        """In the order in which they start."""
        return [self._prefect(), self._mlflow(), self._scheduler(), self._workers()]

    @property
    def num_workers(self) -> int:
        """Number of Dask workers: as configured, else one per GPU, or per core without GPUs."""
        return self._settings.num_workers or len(describe().gpus) or usable_cores()

    def client_environment(self) -> dict[str, str]:
        """Environment of a client of these services."""
        return {
            "PACELINE_HOME": str(self._site.root),
            "PACELINE_TLS": str(self._home.tls),
            "PACELINE_SCHEDULER": self.scheduler_address,
            "PREFECT_API_URL": self.prefect_url,
            "PREFECT_API_AUTH_STRING": self._prefect_user,
            "MLFLOW_TRACKING_URI": self.mlflow_url,
            "MLFLOW_TRACKING_USERNAME": USER,
            "MLFLOW_TRACKING_PASSWORD": self._vault["mlflow_password"],
        }

    def prefect_environment(self) -> dict[str, str]:
        """Environment of Prefect's server and of its database migration."""
        return _own_environment() | {
            "PREFECT_HOME": str(self._home.work / "prefect"),
            "PREFECT_SERVER_DATABASE_CONNECTION_URL": self._postgres.uri("prefect", "postgresql+asyncpg"),
            "PREFECT_SERVER_API_AUTH_STRING": self._prefect_user,
            "PREFECT_API_AUTH_STRING": self._prefect_user,
            "PREFECT_UI_API_URL": self.prefect_url,
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": LEASES_ON_DISK,
            # Defaults of 5 and 10 s: too little for a start while trainings use all cores.
            "PREFECT_SERVER_DATABASE_CONNECTION_TIMEOUT": "60",
            "PREFECT_SERVER_DATABASE_TIMEOUT": "60",
        }

    def mlflow_environment(self) -> dict[str, str]:
        """Environment of MLflow's server and of its database migration."""
        auth_config = self._home.secrets / "mlflow_auth.ini"
        write_privately(auth_config, AUTH_CONFIG.format(uri=self._postgres.uri("mlflow_auth", MLFLOW_DRIVER)))
        environment = _own_environment() | {
            "MLFLOW_BACKEND_STORE_URI": self._postgres.uri("mlflow", MLFLOW_DRIVER),
            "MLFLOW_ARTIFACTS_DESTINATION": str(self._home.artifacts),
            "MLFLOW_AUTH_CONFIG_PATH": str(auth_config),
            "MLFLOW_AUTH_ADMIN_PASSWORD": self._vault["mlflow_admin_password"],
            "MLFLOW_FLASK_SERVER_SECRET_KEY": self._vault["mlflow_secret_key"],
        }
        if self._settings.host != LOOPBACK:
            origin = f"{self._settings.host}:{self._settings.ports['mlflow']}"
            environment["MLFLOW_SERVER_ALLOWED_HOSTS"] = f"{origin},localhost:*,{LOOPBACK}:*"
            environment["MLFLOW_SERVER_CORS_ALLOWED_ORIGINS"] = f"http://{origin}"
        return environment

    @property
    def _prefect_user(self) -> str:
        return f"{USER}:{self._vault['prefect_password']}"

    def _prefect(self) -> Service:
        host, port = self._settings.host, self._settings.ports["prefect"]
        return Service(
            daemon=Daemon("prefect", self._home),
            command=_python("prefect", "server", "start", "--host", host, "--port", str(port)),
            environment=self.prefect_environment(),
            ports=(("prefect", host, port),),
            check=lambda: _require_answer(f"{self.prefect_url}/admin/version", self._prefect_user),
            address=self.prefect_url,
        )

    def _mlflow(self) -> Service:
        host, port = self._settings.host, self._settings.ports["mlflow"]
        command = _python("paceline.tasks.track.serve", "--host", host, "--port", str(port), "--workers", "1")
        return Service(
            daemon=Daemon("mlflow", self._home),
            command=(*command, "--app-name", "basic-auth"),
            environment=self.mlflow_environment(),
            ports=(("mlflow", host, port),),
            check=self._check_mlflow,
            address=self.mlflow_url,
        )

    def _check_mlflow(self) -> None:
        """It lets its user in, who is made if need be: runs are not logged as the administrator."""
        user = f"{USER}:{self._vault['mlflow_password']}"
        experiments = f"{self.mlflow_url}/api/2.0/mlflow/experiments/search?max_results=1"
        if status(experiments, user) == REFUSED:
            admin = f"{ADMIN}:{self._vault['mlflow_admin_password']}"
            users = f"{self.mlflow_url}/api/2.0/mlflow/users"
            if status(f"{users}/get?username={USER}", admin) == UNKNOWN:
                ask(f"{users}/create", admin, {"username": USER, "password": self._vault["mlflow_password"]})
        _require_answer(experiments, user)

    def _scheduler(self) -> Service:
        host, port = self._settings.host, self._settings.ports["scheduler"]
        status_port = self._settings.ports["dashboard"]
        command = _python("distributed.cli.dask_scheduler", "--host", f"tls://{host}", "--port", str(port))
        return Service(
            daemon=Daemon("scheduler", self._home),
            command=(*command, *self._tls(), "--no-dashboard", "--dashboard-address", f"{LOOPBACK}:{status_port}"),
            environment=self._dask_environment(),
            ports=(("scheduler", host, port), ("dashboard", LOOPBACK, status_port)),
            check=lambda: _require_answer(f"{self._dashboard}/health"),
            address=f"{self.scheduler_address}, status and metrics on {self._dashboard}",
        )

    def _workers(self) -> Service:
        arguments = [self.scheduler_address, *self._tls(), "--host", f"tls://{self._settings.host}", "--nthreads", "1"]
        arguments += ["--local-directory", str(self._home.work), "--no-dashboard", "--dashboard-address"]
        arguments += [f"{LOOPBACK}:0", "--death-timeout", "60", "--preload", "paceline.tasks.train.launch.placement"]
        gpus = [gpu.uuid for gpu in describe().gpus][: self.num_workers]
        environment = self._dask_environment()
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
            arguments += ["--preload-nanny", "paceline.tasks.cluster.gpu_workers"]
        return Service(
            daemon=Daemon("workers", self._home),
            command=_python("distributed.cli.dask_worker", *arguments, "--nworkers", str(self.num_workers)),
            environment=environment,
            ports=(),
            check=self._check_workers,
            address=f"{self.num_workers} of one {'GPU' if gpus else 'thread'} each",
        )

    def _check_workers(self) -> None:
        counts = json.loads(ask(f"{self._dashboard}/json/counts.json"))
        if counts["workers"] < self.num_workers:
            raise OSError(f"{counts['workers']} of {self.num_workers} workers have come")

    def _dask_environment(self) -> dict[str, str]:
        """No password: a rank gets that of the run's own user with its order."""
        shared = {"PACELINE_HOME": str(self._site.root), "PACELINE_TLS": str(self._home.tls)}
        return _own_environment() | {"DASK_CONFIG": str(DASK_SETTINGS)} | shared

    def _tls(self) -> tuple[str, ...]:
        tls = self._home.tls
        return ("--tls-ca-file", f"{tls}/ca.pem", "--tls-cert", f"{tls}/cert.pem", "--tls-key", f"{tls}/key.pem")


def _python(module: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-P", "-m", module, *arguments)


def check_workers(settings: Settings) -> None:
    """Check that this host can run the configured number of workers. Raises InputError: it cannot."""
    num_workers, gpus = settings.num_workers or 0, describe().gpus
    if num_workers < 0:
        raise InputError(f"--workers {num_workers}; give how many, or 0 for as many as fit")
    if gpus and num_workers > len(gpus):
        raise InputError(f"--workers {num_workers}, and this host has {len(gpus)} GPUs; each has one worker")


def _own_environment() -> dict[str, str]:
    """The caller's environment without the variables of other servers."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN_PREFIXES)}
    return environment | QUIET_ENVIRONMENT


def _require_answer(url: str, user: str | None = None) -> None:
    if not ask(url, user):
        raise urllib.error.URLError("an empty answer")
