"""Whether a store can be reached at all, told within seconds and without MLflow, which takes one to import."""

from __future__ import annotations

from urllib.parse import urlparse

from paceline.conf.credentials import holds_credential
from paceline.tasks.errors import InputError
from paceline.tasks.http import ANSWER_SECONDS, status
from paceline.tasks.redact import redact


def check_address(variable: str, address: str, remedy: str) -> None:
    """Refuse a server's address that holds a password: it would be in every record that says where a run is kept.

    Raises:
        InputError: as it says.
    """
    if holds_credential(address):
        raise InputError(
            f"{variable}={redact(address)} holds a credential, and where a run is kept is stored and shown; {remedy}"
        )


def check_tracking_uri(tracking_uri: str) -> None:
    """The same for a store's.

    Raises:
        InputError: as it says.
    """
    remedy = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD instead"
    if not tracking_uri.startswith("http"):
        remedy = "give the database's client the password by its own means, such as PGPASSWORD or ~/.pgpass"
    check_address("MLFLOW_TRACKING_URI", tracking_uri, remedy)


def check_reachable(tracking_uri: str) -> None:
    """Refuse a store that MLflow cannot write, or a server that does not answer, within seconds.

    Raises:
        InputError: as it says.
    """
    check_tracking_uri(tracking_uri)
    scheme = urlparse(tracking_uri).scheme
    if scheme in ("", "file"):
        raise InputError(
            f"MLFLOW_TRACKING_URI={tracking_uri} is a file store, which MLflow no longer writes; "
            "use sqlite:////path/mlflow.db or a server's http address"
        )
    if scheme not in ("http", "https"):
        return
    # MLflow's client retries for minutes; any HTTP answer at all within seconds shows that the server is there.
    try:
        status(f"{tracking_uri.rstrip('/')}/health")
    except (OSError, ValueError) as error:
        raise InputError(
            f"MLFLOW_TRACKING_URI={tracking_uri} does not answer within {ANSWER_SECONDS:g} s ({error}); "
            "start the server (mlflow server) or unset the variable"
        ) from error
