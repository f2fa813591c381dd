"""Requests over HTTP, with or without a user."""

import base64
import http.client
import json
import urllib.error
import urllib.request
from http import HTTPStatus
from typing import Any

ANSWER_SECONDS = 5.0  # a server on the same network that is well answers in a thousandth of it


def ask(url: str, user: str | None = None, body: dict[str, Any] | None = None) -> bytes:
    """GET, or POST where there is a body. Raises OSError: no answer, or (`urllib.error.HTTPError`) one that refuses."""
    request = urllib.request.Request(url, json.dumps(body).encode() if body is not None else None)
    request.add_header("Content-Type", "application/json")
    if user is not None:
        request.add_header("Authorization", "Basic " + base64.b64encode(user.encode()).decode())
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            content: bytes = answer.read()
    except http.client.HTTPException as error:
        raise OSError(f"no answer in HTTP: {error!r}") from error
    return content


def status(url: str, user: str | None = None) -> int:
    """The status of the answer to a GET. Raises OSError: no answer."""
    try:
        ask(url, user)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    return HTTPStatus.OK
