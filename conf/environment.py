"""Facts of this machine: where state lives, which servers to use. No other module reads settings from variables."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import Field, SecretStr, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

# Nothing leaves the machine. Each engine has its own word for it; MLflow ignores DO_NOT_TRACK=1, "true" works.
QUIET_ENVIRONMENT = {
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # Registering Prefect's block types looks up a catalogue on the internet at every start of the temporary API.
    "PREFECT_API_BLOCKS_REGISTER_ON_START": "false",
    "PREFECT_CLI_PROMPT": "false",
    # The log of a flow run has the lines of our modules; outside of a run they are on the terminal only.
    "PREFECT_LOGGING_EXTRA_LOGGERS": "paceline",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    # The temporary API's start takes 8 to 13 s on a fresh home; the default of 20 s is too near on a busy machine.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "GIT_PYTHON_REFRESH": "quiet",
    # MLflow's client then tries for twelve minutes, two minutes apart at most; the default is four.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "10",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "4",
}
JSON_LOGS = {
    "PACELINE_LOG_FORMAT": "json",
    "PREFECT_LOGGING_FORMATTERS_JSON_CLASS": "paceline.tasks.log_lines.JsonFormatter",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_FORMATTER": "json",
    "PREFECT_LOGGING_COLORS": "false",
}
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
OWN_NAMES = ("127.0.0.1", "localhost")


def _directory_of_leases() -> Path:
    """The same for all users of a host: where they may all write, and nothing is removed behind their backs.

    Debian lets everybody write to /run/lock, others do not, unless the directory was made for all (units). Not
    /dev/shm, where a user's files go with the user's last login session (RemoveIPC of systemd).
    """
    lock = Path("/run/lock")
    for_all = any(place.is_dir() and place.stat().st_mode & stat.S_IWOTH for place in (lock / "paceline", lock))
    return (lock if for_all else Path("/var/tmp")) / "paceline"


class Environment(BaseSettings):
    """What the environment says of this machine."""

    model_config = SettingsConfigDict(frozen=True, extra="ignore")

    home: Path = Field(default=Path(".paceline"), validation_alias="PACELINE_HOME")
    """State: prepared sets, checkpoints, the default MLflow store."""
    tracking_uri_given: str | None = Field(default=None, validation_alias="MLFLOW_TRACKING_URI")
    """MLflow server or store, where one was given."""
    mlflow_database: SecretStr | None = Field(default=None, validation_alias="MLFLOW_BACKEND_STORE_URI")
    """Database behind the MLflow server, for the clean-up of deleted runs, where it was given."""
    prefect_api_url: str | None = Field(default=None, validation_alias="PREFECT_API_URL")
    """Prefect server, where one was given; else Prefect's own temporary one."""
    prefect_user: SecretStr | None = Field(default=None, validation_alias="PREFECT_API_AUTH_STRING")
    """Name and password for the Prefect server, with a colon between, where it wants them."""

    leases: Path = Field(default_factory=_directory_of_leases, validation_alias="PACELINE_LEASES")
    """Where this host's device leases lie: on its own disk, and the same for all who share its devices."""
    tls_given: Path | None = Field(default=None, validation_alias="PACELINE_TLS")
    """Directory with the certificates of the Dask parts (ca.pem, cert.pem, key.pem), where one was given."""

    scheduler: str | None = Field(default=None, validation_alias="PACELINE_SCHEDULER")
    """Address of the Dask scheduler that runs which Prefect starts may join; none where it is not set."""
    cluster_tls: str | None = Field(default=None, validation_alias="PACELINE_CLUSTER_TLS")
    """`off` where runs that Prefect starts may go without TLS between the Dask parts."""

    code_given: str = Field(default="", validation_alias="PACELINE_CODE")
    """Directories and packages of own Lightning code that runs which Prefect starts may import, with commas between.

    `%2C` stands for a comma in a path.
    """

    cache_given: Path | None = Field(default=None, validation_alias="PACELINE_CACHE")
    """Directory for copies of what workers of this host read from an object store; best on a disk of the host."""
    cache_gib_given: str | None = Field(default=None, validation_alias="PACELINE_CACHE_GIB")
    """How large those may become together, GiB, where it was given; 0 for none."""

    warm_given: str = Field(default="", validation_alias="PACELINE_WARM")
    """How long a process waits for the next run: minutes, `session` or `off`; a quarter of an hour in a terminal."""

    @field_validator("home", "tls_given", "cache_given", mode="before")
    @classmethod
    def _drop_empty(cls, directory: object, field: ValidationInfo) -> object:
        return directory or cls.model_fields[str(field.field_name)].default

    @property
    def root(self) -> Path:
        """`home` as an absolute path."""
        return self.home.expanduser().absolute()

    @property
    def tls_directory(self) -> Path:
        """Where the certificates lie: the given directory, else `tls` under `home`."""
        return (self.tls_given or self.root / "tls").expanduser().absolute()

    @property
    def cache_directory(self) -> Path:
        """Where copies of remote objects lie: the given directory, else `cache` under `home`."""
        return (self.cache_given or self.root / "cache").expanduser().absolute()

    @property
    def tracking_uri(self) -> str:
        """The MLflow store: the given one, else sqlite under `home`."""
        return self.tracking_uri_given or f"sqlite:///{self.root / 'mlflow.db'}"

    @property
    def artifact_root(self) -> str | None:
        """Where artifacts of the default store lie; None when a given store decides."""
        return None if self.tracking_uri_given else (self.root / "mlartifacts").as_uri()


def quieten() -> None:
    """Set the engines' switches against telemetry where the user has not set them. Call before importing them."""
    for name, value in QUIET_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if os.environ.get("NO_COLOR"):
        os.environ.setdefault("PREFECT_LOGGING_COLORS", "false")
    spare_loopback()


@contextmanager
def quiet_engines() -> Iterator[None]:
    """Quieten the engines in the body, and restore the environment variables of the user's script after it."""
    before = dict(os.environ)
    quieten()
    changed = {name for name, value in os.environ.items() if before.get(name) != value}
    try:
        yield
    finally:
        for name in changed:
            os.environ.pop(name, None)
        os.environ |= {name: before[name] for name in changed & before.keys()}


def set_verbosity(*, quiet: bool, verbose: bool, as_json: bool = False) -> None:
    """Set how much the engines log, and whether as lines of JSON. Call before importing them."""
    if as_json:
        os.environ |= JSON_LOGS
    if quiet or verbose:
        level = "ERROR" if quiet else "DEBUG"
        os.environ |= {"PREFECT_LOGGING_LEVEL": level, "MLFLOW_LOGGING_LEVEL": level}


def spare_loopback() -> None:
    """Send this host's requests to itself past a proxy, which libraries would use for them."""
    if not any(os.environ.get(name) for name in (*PROXIES, *map(str.upper, PROXIES))):
        return
    variable = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    names = [name.strip() for name in variable.split(",") if name.strip()]
    if "*" not in names:
        no_proxy = ",".join(dict.fromkeys([*names, *OWN_NAMES]))
        os.environ |= {"no_proxy": no_proxy, "NO_PROXY": no_proxy}
