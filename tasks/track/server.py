"""What a store says of itself, and whether it lets this user in."""

from __future__ import annotations

from mlflow.exceptions import MlflowException
from mlflow.utils.credentials import get_default_host_creds
from mlflow.utils.rest_utils import http_request
from sqlalchemy.exc import SQLAlchemyError

from tasks.errors import InputError, one_line
from tasks.redact import redact
from tasks.track.connectivity import check_reachable
from tasks.track.store import LOG_IN, is_refusal, open_store, sqlite_path
from tasks.http import ANSWER_SECONDS


def server_version(tracking_uri: str) -> str | None:
    """The version of the server at an http address, `in use` for another store; None for a file that is not there yet.

    Raises:
        InputError: it does not answer, refuses this user, or is no store of MLflow's.
    """
    check_reachable(tracking_uri)
    file = sqlite_path(tracking_uri)
    if file is not None and not file.exists():
        return None
    try:
        open_store(tracking_uri).search_experiments(max_results=1)
        if not tracking_uri.startswith("http"):
            return "in use"
        answer = http_request(  # type: ignore[no-untyped-call]
            get_default_host_creds(tracking_uri),  # type: ignore[no-untyped-call]
            "/version",
            "GET",
            max_retries=0,
            timeout=ANSWER_SECONDS,
        )
    except (MlflowException, SQLAlchemyError) as error:
        refused = is_refusal(error)
        remedy = LOG_IN if refused else "look at the store's log"
        raise InputError(
            f"MLFLOW_TRACKING_URI={redact(tracking_uri)} "
            f"{'refuses this user' if refused else 'cannot be used'} ({redact(one_line(error))[:200]}); {remedy}"
        ) from error
    return str(answer.text).strip()
