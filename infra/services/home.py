"""State directory of a set of services: settings, which are chosen once, and secrets, which are never printed."""

import fcntl
import ipaddress
import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from paceline.tasks.errors import InputError
from paceline.tasks.files import write_durably
from paceline.tasks.records.record import Record

LOOPBACK = "127.0.0.1"
USUAL_PORTS = {"postgres": 5432, "prefect": 4200, "mlflow": 5000, "scheduler": 8786, "dashboard": 8787, "proxy": 443}
"""Taken where they are free when a set is made."""
TRAVERSABLE, PRIVATE, OWN_ONLY, OTHERS = 0o711, 0o700, 0o600, 0o077  # modes of directories and files, and a mask
NUM_BYTES = 32  # of a secret
SECRETS = (
    *("postgres_password", "prefect_database_password", "mlflow_database_password", "prefect_password"),
    *("mlflow_admin_password", "mlflow_password", "mlflow_secret_key"),
)


class Settings(Record):
    """Settings of a set of services."""

    host: str = LOOPBACK  # address that all but PostgreSQL and Dask's status pages listen on
    ports: dict[str, int]
    num_workers: int | None = None  # None: one per GPU, or per core where there is none
    domain: str | None = None  # of the names prefect.DOMAIN and mlflow.DOMAIN of a proxy with TLS
    pool: str | None = None  # work pool whose runs this host starts
    backups: str | None = None  # directory for a backup every night
    keep: int = 14  # number of backups to keep
    versions: dict[str, str] = Field(default_factory=dict)
    """Of the packages whose databases these are; by them an upgrade is noticed."""


def write_privately(path: Path, text: str) -> None:
    """Write a file that nobody else can read, at no time."""
    before = os.umask(OTHERS)
    try:
        write_durably(path, text.encode())
    finally:
        os.umask(before)
    path.chmod(OWN_ONLY)


class Home:
    """The directory of one set."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.secrets = root / "secrets"
        self.tls = root / "tls"
        self.database = root / "postgres"
        self.artifacts = root / "artifacts"
        self.work = root / "work"
        self.logs = root / "logs"
        self.pids = root / "pids"
        self.environment = root / "environment"
        self._settings = root / "settings.json"

    def make(self) -> None:
        """Make the directories that are not there yet; others may pass through the home, and read nothing in it."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self.root.chmod(TRAVERSABLE)  # PostgreSQL does not run as root, and lives below
            for directory in (self.secrets, self.artifacts, self.work, self.logs, self.pids):
                self.make_private(directory.name)
            if self.tls.exists():
                self.tls.chmod(PRIVATE)
        except OSError as error:
            raise self._not_writable(error) from error

    def make_private(self, name: str) -> None:
        """Make a directory that nobody else can enter; "." is the home itself, which others pass."""
        directory = self.root / name
        if name != "." and (directory.is_relative_to(self.root) or not directory.exists()):
            directory.mkdir(exist_ok=True, parents=True)
            directory.chmod(PRIVATE)

    def make_secrets(self) -> None:
        """Make the secrets that are not there yet, each in a private file."""
        for path in (self.secrets / name for name in SECRETS):
            if not path.exists():
                write_privately(path, secrets.token_urlsafe(NUM_BYTES))  # safe in URIs and shells too

    def secret(self, name: str) -> str:
        """Read a secret. Raises InputError: it is missing, or others can read it."""
        path = self.secrets / name
        try:
            if path.stat().st_mode & OTHERS:
                raise InputError(f"{path} can be read by others; chmod 600 it, and think about a new secret")
            return path.read_text(encoding="utf-8").strip()
        except FileNotFoundError as error:
            raise InputError(f"{path} is missing; bring it back with infra/restore") from error

    def _not_writable(self, error: OSError) -> InputError:
        return InputError(f"--home {self.root} cannot be written ({error}); name a directory of yours")

    @property
    def is_made(self) -> bool:
        """Whether a set was ever started here."""
        return self._settings.is_file()

    def settings(self) -> Settings:
        """Read the settings of the set. Raises InputError: there is none, or its file is damaged."""
        try:
            return Settings.model_validate_json(self._settings.read_bytes())
        except FileNotFoundError as error:
            raise InputError(f"--home {self.root} holds no services; start them with infra/up") from error
        except ValidationError as error:
            raise InputError(f"{self._settings} is damaged; restore it with infra/restore, or fix it") from error

    def keep(self, settings: Settings) -> None:
        """Save the settings of the set."""
        write_durably(self._settings, settings.model_dump_json(indent=2).encode())

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other commands away from this set meanwhile. Raises InputError: one is at work on it, or none may be."""
        try:
            self.root.parent.mkdir(parents=True, exist_ok=True)
            # Beside the home, which infra/restore replaces as a whole.
            lock = os.open(
                self.root.with_name(f".{self.root.name}.lock"),
                os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW,
                0o600,
            )
        except OSError as error:
            raise self._not_writable(error) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError as error:
            raise InputError(f"another command is at work on --home {self.root}; wait for its end") from error
        finally:
            os.close(lock)


def choose_settings(old: Settings, ports: Mapping[str, int], **chosen: Any) -> Settings:
    """Choose settings: from the options, else the `old` ones, which may lack ports; these are the usual or free ones.

    Of 0 workers there will be as many as fit. Raises InputError: an unknown service, or an address that clients cannot
    connect to.
    """
    if unknown := sorted(set(ports) - set(USUAL_PORTS)):
        raise InputError(f"--port {unknown[0]}=... names no service; use one of {', '.join(USUAL_PORTS)}")
    if (host := chosen["host"]) is not None and _is_any(host):
        raise InputError(f"--host {host} is not an address that clients can connect to; give this host's address")
    if (keep := chosen["keep"]) is not None and keep < 1:
        raise InputError(f"--keep {keep} would remove every backup; give 1 or more")
    numbers = old.ports | dict(ports)
    for name, usual in USUAL_PORTS.items():
        if not numbers.get(name):
            numbers[name] = usual if usual not in numbers.values() and is_free(usual) else free_port()
    given = {name: value for name, value in chosen.items() if value is not None}
    if given.get("num_workers") == 0:
        given["num_workers"] = None
    return old.model_copy(update={**given, "ports": numbers})


def _is_any(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def is_free(port: int, host: str = LOOPBACK) -> bool:
    """Whether a port can be listened on; port 0: whether an address or a name is one of this host."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port
