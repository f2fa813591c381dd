"""Checks within seconds that a store can be reached, without MLflow, whose import takes a second."""

from urllib.parse import urlparse

from paceline.conf.credentials import holds_credential
from paceline.tasks.errors import InputError
from paceline.tasks.http import ANSWER_SECONDS, status
from paceline.tasks.redact import redact


def check_address(variable: str, address: str, remedy: str) -> None:
    """Refuse, by an InputError, an address with a password: every record with the address of a run would contain it."""
    if holds_credential(address):
        fault = f"{variable}={redact(address)} holds a credential, and every run records the address"
        raise InputError(f"{fault}; {remedy}")


def check_tracking_uri(tracking_uri: str) -> None:
    """Refuse a store's address that holds a password. Raises InputError: the address is refused."""
    remedy = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD instead"
    if not tracking_uri.startswith("http"):
        remedy = "give the database's client the password by its own means, such as PGPASSWORD or ~/.pgpass"
    check_address("MLFLOW_TRACKING_URI", tracking_uri, remedy)


def check_reachable(tracking_uri: str) -> None:
    """Refuse, by an InputError, a store that MLflow cannot write, or a server that does not answer within seconds."""
    check_tracking_uri(tracking_uri)
    scheme = urlparse(tracking_uri).scheme
    if scheme in ("", "file"):
        fault = f"MLFLOW_TRACKING_URI={tracking_uri} is a file store, which MLflow no longer writes"
        raise InputError(f"{fault}; use sqlite:////path/mlflow.db or a server's http address")
    if scheme not in ("http", "https"):
        return
    # MLflow's client retries for minutes; any HTTP answer at all within seconds shows that the server is there.
    try:
        status(f"{tracking_uri.rstrip('/')}/health")
    except (OSError, ValueError) as error:
        fault = f"MLFLOW_TRACKING_URI={tracking_uri} does not answer within {ANSWER_SECONDS:g} s ({error})"
        raise InputError(f"{fault}; start the server (mlflow server) or unset the variable") from error
