"""What an MLflow server says of itself, and whether it lets this user in."""

from __future__ import annotations

from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from mlflow.utils.credentials import get_default_host_creds
from mlflow.utils.rest_utils import http_request

from tasks.errors import InputError, one_line
from tasks.redact import redact
from tasks.track.reach import REACH_SECONDS, check_reachable


def server_version(tracking_uri: str) -> str:
    """The version of the server at an http address.

    Raises:
        InputError: it does not answer, or refuses this user.
    """
    check_reachable(tracking_uri)
    creds = get_default_host_creds(tracking_uri)  # type: ignore[no-untyped-call]
    try:
        MlflowClient(tracking_uri).search_experiments(max_results=1)
        answer = http_request(  # type: ignore[no-untyped-call]
            creds, "/version", "GET", max_retries=0, timeout=REACH_SECONDS
        )
    except MlflowException as error:
        raise InputError(
            f"MLFLOW_TRACKING_URI={redact(tracking_uri)} refuses this user ({redact(one_line(error))[:200]}); set "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        ) from error
    return str(answer.text).strip()
