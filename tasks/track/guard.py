"""MLflow's applications for users and for the holder of a token, without what runs commands for them.

MLflow 3.17 serves an assistant that runs commands on the server's host, and that each caller may configure. Its routes
are removed before MLflow mounts them, so that no spelling of a path reaches them. `paceline.tasks.track.serve` starts
these applications in place of MLflow's own.
"""

import os
import re
import secrets

from fastapi import Request
from fastapi.responses import HTMLResponse, PlainTextResponse, Response
from flask import request as flask_request
from mlflow.server import app as flask_app
from mlflow.server.assistant.api import assistant_router
from mlflow.server.gateway_api import gateway_router
from mlflow.server.job_api import job_api_router
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.tasks.track.serve import TOKEN

WITHHELD_ROUTERS = (assistant_router, gateway_router, job_api_router)
"""Routers outside of Flask that run commands, send requests to other hosts, or show jobs."""
WITHHELD = re.compile(
    r"/mlflow/(demo|gateway-proxy|genai|issues/invoke|jobs|prompt-optimization|runs/create-promptlab-run|scorer/invoke"
    r"|webhooks)(/|$)"
)
"""Flask's routes of that kind, by the rule that Flask has matched and not by the path as a caller spelled it."""
QUERY = "token"  # name of the token in the address that is opened first
REFUSAL = "This server needs its token. Open the address that paceline ui has printed.\n"
OPENED = """<!DOCTYPE html><title>MLflow</title><a href="./">MLflow</a>
<script>location.replace(location.pathname + location.hash)</script>
"""
"""Loads the page again, with the cookie. A redirect is not enough: after a click on a page of another site, such as a
terminal in the browser, the browser does not send a strict cookie to the redirect's target."""


def for_users() -> ASGIApp:
    """MLflow's application for the users of its basic authentication."""
    from mlflow.server.auth import create_app  # of mlflow[auth]

    _withhold()
    application: ASGIApp = create_app()
    return application


def for_token_holder() -> ASGIApp:
    """MLflow's application for the holder of the token in `PACELINE_UI_TOKEN`."""
    from mlflow.server.fastapi_app import create_fastapi_app

    _withhold()
    return TokenGuard(create_fastapi_app(), os.environ[TOKEN])


def _withhold() -> None:
    for router in WITHHELD_ROUTERS:
        router.routes.clear()
    flask_app.before_request(_refuse_withheld)


def _refuse_withheld() -> tuple[str, int] | None:
    rule = flask_request.url_rule
    return ("Not served by Paceline\n", 404) if rule is not None and WITHHELD.search(rule.rule) else None


class TokenGuard:
    """An application for the holder of a token, which comes in the first address, in a cookie or as a bearer's token.

    A browser gets the cookie with the first page. MLflow's clients have the token in `MLFLOW_TRACKING_TOKEN`.
    """

    def __init__(self, application: ASGIApp, token: str) -> None:
        if not token:
            raise ValueError("an empty token")
        self._application, self._token = application, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it here."""
        if scope["type"] == "lifespan":
            await self._application(scope, receive, send)
        elif scope["type"] != "http":  # MLflow has no web sockets
            await send({"type": "websocket.close", "code": 1008})
        else:
            answer = self._answer(Request(scope))
            await (answer or self._application)(scope, receive, send)

    def _answer(self, request: Request) -> Response | None:
        """The answer to a request with the token in its address or without any token; None for a request to pass on."""
        # Browsers send a cookie to all ports of a host, so its name has the port.
        cookie = f"paceline-ui-{request.scope['server'][1]}"
        if request.method == "GET" and self._is_token(request.query_params.get(QUERY)):
            page = HTMLResponse(OPENED, headers={"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"})
            page.set_cookie(cookie, self._token, httponly=True, samesite="strict")
            return page
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        if self._is_token(request.cookies.get(cookie)) or (scheme.lower() == "bearer" and self._is_token(bearer)):
            return None
        return PlainTextResponse(REFUSAL, 401)

    def _is_token(self, given: str | None) -> bool:
        return secrets.compare_digest((given or "").encode(), self._token.encode())
