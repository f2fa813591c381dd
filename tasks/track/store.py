"""The MLflow store: is it there, is it migrated, which experiment. Knows nothing of runs."""

from __future__ import annotations

import fcntl
import logging
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlparse

from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from sqlalchemy.exc import SQLAlchemyError

from tasks.errors import InputError
from tasks.track.redact import redact

REACH_SECONDS = 5

logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # it tells of every migration


def check_store(tracking_uri: str, experiment: str, artifact_root: str | None) -> str:
    """Make sure the store can be used, creating it and the experiment if need be; return the experiment's id.

    Args:
        tracking_uri: sqlite, a database server, or an MLflow server.
        experiment: name.
        artifact_root: where a new experiment's artifacts go; None lets the server decide.

    Raises:
        InputError: the store cannot be reached or written.
    """
    scheme = urlparse(tracking_uri).scheme
    if scheme in ("http", "https"):
        _check_server(tracking_uri)
    elif scheme in ("", "file"):
        raise InputError(
            f"MLFLOW_TRACKING_URI={tracking_uri} is a file store, which MLflow no longer writes; "
            "use sqlite:////path/mlflow.db or a server's http address"
        )
    try:
        with _only_one(tracking_uri):
            return _experiment_id(MlflowClient(tracking_uri), experiment, artifact_root)
    except (MlflowException, SQLAlchemyError, OSError) as error:
        first = str(error).strip().splitlines()[0]
        raise InputError(
            f"MLFLOW_TRACKING_URI={redact(tracking_uri)} cannot be used ({redact(first)}); "
            "give a store that exists and can be written"
        ) from error


def _check_server(tracking_uri: str) -> None:
    # MLflow's client retries for minutes; any HTTP answer at all within seconds shows that the server is there.
    try:
        urllib.request.urlopen(f"{tracking_uri.rstrip('/')}/health", timeout=REACH_SECONDS).close()
    except urllib.error.HTTPError:
        return
    except (OSError, ValueError) as error:
        raise InputError(
            f"MLFLOW_TRACKING_URI={redact(tracking_uri)} does not answer within {REACH_SECONDS} s ({error}); "
            "start the server (mlflow server) or unset the variable"
        ) from error


def sqlite_path(tracking_uri: str) -> Path | None:
    """The file of a sqlite store, None for any other: `sqlite:///relative`, `sqlite:////absolute`."""
    parsed = urlparse(tracking_uri)
    return Path(parsed.path[1:]) if parsed.scheme == "sqlite" else None


@contextmanager
def _only_one(tracking_uri: str) -> Iterator[None]:
    """One process at a time: several first clients of a new sqlite file can break it."""
    path = sqlite_path(tracking_uri)
    if path is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(path.with_name(path.name + ".lock"), os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _experiment_id(client: MlflowClient, name: str, artifact_root: str | None) -> str:
    found = client.get_experiment_by_name(name)
    if found is not None:
        if found.lifecycle_stage == "deleted":
            raise InputError(
                f"track.experiment={name} is deleted in this store; "
                "restore it (mlflow experiments restore) or name another"
            )
        return str(found.experiment_id)
    try:
        return str(client.create_experiment(name, artifact_location=artifact_root))
    except MlflowException:
        found = client.get_experiment_by_name(name)  # another process was first
        if found is None:
            raise
        return str(found.experiment_id)
