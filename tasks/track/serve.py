"""`mlflow server` with MLflow's own options and variables, on the applications of `paceline.tasks.track.guard`.

    python -P -m paceline.tasks.track.serve --host 127.0.0.1 --port 5000 --app-name basic-auth

Every MLflow server that Paceline starts is this one. It lets in the users of `--app-name basic-auth`, or the holder of
the token in `PACELINE_UI_TOKEN`, and nobody else. MLflow's workers import their application by name; this module
replaces the name where MLflow builds the workers' command.
"""

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from paceline.tasks.errors import InputError, PacelineError, RunError

TOKEN = "PACELINE_UI_TOKEN"  # environment variable with the token of a server without users
STORE = "MLFLOW_BACKEND_STORE_URI"
"""MLflow's own variable; never an option, since everybody on a host can read command lines."""
PACKAGES = Path(__file__).parents[3]
"""Directory of this package. A worker looks there first, and not in the directory where it was started."""
WITHOUT_USERS, WITH_USERS = "mlflow.server.fastapi_app:app", "mlflow.server.auth:create_app"
APPLICATIONS = {
    WITHOUT_USERS: "paceline.tasks.track.guard:for_token_holder",
    WITH_USERS: "paceline.tasks.track.guard:for_users",
}
"""MLflow's applications and what is served in their place."""
OFF = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_ENABLE_AI_GATEWAY": "false"}
"""MLflow's switches for what Paceline does not need: jobs run code, in 8 more processes, and a gateway calls models."""
BUILDER = "_build_uvicorn_command"
OTHER_BUILDERS = ("_build_gunicorn_command", "_build_waitress_command")


def main() -> None:
    """Serve until a signal ends it."""
    from mlflow import server  # MLflow: a second
    from mlflow.cli import cli

    from paceline.tasks.track.store import open_store, sqlite_path

    if BUILDER not in server._run_server.__code__.co_names:
        raise RunError(f"this MLflow does not start its server by mlflow.server.{BUILDER}; install mlflow<3.19")
    setattr(server, BUILDER, _with_guard(getattr(server, BUILDER)))
    for name in OTHER_BUILDERS:
        setattr(server, name, _refuse)
    os.environ |= OFF
    store = os.environ.get(STORE, "")
    if sqlite_path(store) is not None:
        open_store(store)  # MLflow would create or migrate it without our lock
    cli(["server", *sys.argv[1:]])


def _with_guard(build: Callable[..., list[str]]) -> Callable[..., list[str]]:
    def build_guarded(options: str | None, host: str, port: int, workers: int, app: str, *rest: Any) -> list[str]:
        if app == WITHOUT_USERS and not os.environ.get(TOKEN):
            remedy = f"set {TOKEN}, or add --app-name basic-auth"
            raise InputError(f"a server without users needs a token; {remedy}", setting=TOKEN)
        options = f"{options or ''} --app-dir {shlex.quote(str(PACKAGES))}"
        return build(options, host, port, workers, APPLICATIONS[app], *rest[:1], is_factory=True)

    return build_guarded


def _refuse(*_: object) -> NoReturn:
    raise InputError("--gunicorn-opts and --waitress-opts serve MLflow without Paceline's guard; use --uvicorn-opts")


if __name__ == "__main__":
    try:
        main()
    except PacelineError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2 if isinstance(error, InputError) else 1)
