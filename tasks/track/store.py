"""The MLflow store: existence, migration, experiments."""

import fcntl
import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

from mlflow.entities import Experiment
from mlflow.exceptions import MlflowException
from mlflow.store.tracking import DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH
from mlflow.tracking import MlflowClient
from mlflow.utils.credentials import get_default_host_creds
from mlflow.utils.rest_utils import http_request
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from paceline.tasks.errors import InputError, one_line
from paceline.tasks.files import nearest_existing
from paceline.tasks.http import ANSWER_SECONDS
from paceline.tasks.redact import redact
from paceline.tasks.track.connectivity import check_reachable

REFUSALS = ("UNAUTHENTICATED", "PERMISSION_DENIED", "CUSTOMER_UNAUTHORIZED")
LOG_IN = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD to those of a user who may"
DRAFT_SUFFIX, UNFINISHED_SUFFIX = ".new", ".unfinished"

logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # it logs every migration


def check_store(tracking_uri: str, experiment: str, artifact_root: str | None) -> str:
    """The experiment's id; it and the store are made if need be. Raises InputError: none can be reached or written."""
    check_reachable(tracking_uri)
    try:
        with _only_one(tracking_uri):
            entity = _experiment(MlflowClient(tracking_uri), experiment, artifact_root)
        for path in (sqlite_path(tracking_uri), local_path(entity.artifact_location)):
            if path is not None and not os.access(nearest_existing(path), os.W_OK):
                raise PermissionError(f"{path} is not writable")
        return str(entity.experiment_id)
    except (MlflowException, SQLAlchemyError, ArgumentError, OSError) as error:
        first = str(error).strip().splitlines()[0]
        fault = f"MLFLOW_TRACKING_URI={redact(tracking_uri)} cannot be used ({redact(first)})"
        remedy = LOG_IN if is_refusal(error) else "give a store that exists and can be written"
        raise InputError(f"{fault}; {remedy}") from error


def is_refusal(error: Exception) -> bool:
    """Whether a server refused this user or an anonymous one."""
    return isinstance(error, MlflowException) and error.error_code in REFUSALS


def existing_client(tracking_uri: str) -> MlflowClient:
    """A client of a store that is there, and of its registry.

    Raises InputError: it cannot be reached, or is a file that does not exist, which the client would create.
    """
    check_reachable(tracking_uri)
    file = sqlite_path(tracking_uri)
    if file is not None and not file.exists():
        fault = f"{redact(tracking_uri)} does not exist: there are no runs yet"
        raise InputError(f"{fault}; run paceline run digits first", setting="MLFLOW_TRACKING_URI")
    return open_store(tracking_uri)


def open_store(tracking_uri: str) -> MlflowClient:
    """A client of a store and its registry; one process at a time creates or migrates it, where that is due."""
    with _only_one(tracking_uri):
        return MlflowClient(tracking_uri, tracking_uri)


def sqlite_path(tracking_uri: str) -> Path | None:
    """The file of a sqlite store, None for any other: `sqlite:///relative`, `sqlite:////absolute`."""
    if not tracking_uri.startswith("sqlite:"):
        return None
    database = make_url(tracking_uri).database  # a path may hold `#`, at which urlparse would cut it
    return Path(database) if database else None


def absolute_uri(tracking_uri: str) -> str:
    """The same store for processes in other directories."""
    path = sqlite_path(tracking_uri)
    return tracking_uri if path is None else f"sqlite:///{path.absolute()}"


def local_path(location: str) -> Path | None:
    """Local directory of artifacts; None if a server or a remote store has them."""
    scheme = urlparse(location).scheme
    return Path(url2pathname(location.removeprefix("file://"))) if scheme in ("", "file") else None


@contextmanager
def _only_one(tracking_uri: str) -> Iterator[None]:
    """One process at a time, with a complete store: several first clients of a sqlite file can break it."""
    path = sqlite_path(tracking_uri)
    if path is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock = os.open(path.with_name(path.name + ".lock"), os.O_CREAT | os.O_RDWR, 0o644)
    except OSError:
        if not path.exists():
            raise
        yield  # who may not write there migrates nothing
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists() and _is_unfinished(path):
            path.replace(path.with_name(path.name + UNFINISHED_SUFFIX))
        if not path.exists():
            _create(tracking_uri, path)
        yield
    finally:
        os.close(lock)


def _is_unfinished(path: Path) -> bool:
    """Whether a client of MLflow alone was killed while it created this store: an experiment of MLflow's comes last."""
    with closing(sqlite3.connect(path)) as connection, suppress(sqlite3.DatabaseError):  # MLflow's error is better
        filled = "SELECT EXISTS(SELECT 1 FROM experiments) OR EXISTS(SELECT 1 FROM runs)"
        return bool(connection.execute(filled).fetchone() == (0,))
    return False


def _create(tracking_uri: str, path: Path) -> None:
    """Create a store under another name first: what is there under its own is complete, whatever ends this process."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    draft = path.with_name(path.name + DRAFT_SUFFIX)
    for leftover in (draft, draft.with_name(draft.name + "-journal")):
        leftover.unlink(missing_ok=True)
    address = make_url(tracking_uri).set(database=str(draft)).render_as_string(hide_password=False)
    store = SqlAlchemyStore(address, DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH)  # type: ignore[no-untyped-call]
    store.engine.dispose()
    draft.replace(path)


def _experiment(client: MlflowClient, name: str, artifact_root: str | None) -> Experiment:
    experiment = client.get_experiment_by_name(name)
    if experiment is not None and experiment.lifecycle_stage == "deleted":
        fault = f"track.experiment={name} is deleted in this store"
        raise InputError(f"{fault}; restore it (mlflow experiments restore) or name another")
    try:
        return experiment or client.get_experiment(client.create_experiment(name, artifact_root))
    except MlflowException:
        experiment = client.get_experiment_by_name(name)  # another process was first
        if experiment is None:
            raise
        return experiment


def server_version(tracking_uri: str) -> str | None:
    """The version of the server at an http address, `in use` for another store; None for a file that is not there yet.

    Raises InputError: it does not answer, refuses this user, or is not an MLflow store.
    """
    check_reachable(tracking_uri)
    file = sqlite_path(tracking_uri)
    if file is not None and not file.exists():
        return None
    try:
        open_store(tracking_uri).search_experiments(max_results=1)
        if not tracking_uri.startswith("http"):
            return "in use"
        credentials = get_default_host_creds(tracking_uri)  # type: ignore[no-untyped-call]
        answer = http_request(  # type: ignore[no-untyped-call]
            credentials, "/version", "GET", max_retries=0, timeout=ANSWER_SECONDS
        )
    except (MlflowException, SQLAlchemyError) as error:
        fault, remedy = "cannot be used", "look at the store's log"
        if is_refusal(error):
            fault, remedy = "refuses this user", LOG_IN
        reason = redact(one_line(error))[:200]
        raise InputError(f"MLFLOW_TRACKING_URI={redact(tracking_uri)} {fault} ({reason}); {remedy}") from error
    return str(answer.text).strip()
