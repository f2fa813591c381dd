"""`paceline ui`: the MLflow UI on the runs of this machine."""

import os
import secrets
import sys
from argparse import Namespace

from paceline.conf.environment import Environment
from paceline.flows.commands.console import argument, command
from paceline.tasks.errors import InputError
from paceline.tasks.track.connectivity import check_tracking_uri
from paceline.tasks.track.serve import STORE, TOKEN


@command(
    ("paceline ui", "paceline ui RUN_ID"),
    argument("run RUN_ID", "print the address of this run's page", nargs="?"),
    argument("--port PORT", "TCP port on loopback (default: 5000)", type=int, default=5000),
)
def ui(options: Namespace) -> None:
    """Serve the MLflow UI on the runs of this machine."""
    environment = Environment()
    check_tracking_uri(environment.tracking_uri)
    remote = environment.tracking_uri.startswith("http")
    if not remote and not environment.tracking_uri_given and not (environment.root / "mlflow.db").exists():
        raise InputError(f"PACELINE_HOME={environment.root} holds no runs yet", hint="paceline run digits")
    page = "experiments"
    if options.run:
        from paceline.tasks.track.queries import run_page

        page = run_page(environment.tracking_uri, options.run)
    if remote:
        from paceline.tasks.track.ui_views import server_address

        print(f"{server_address(environment.tracking_uri)}/#/{page}" if options.run else environment.tracking_uri)
        return
    token = secrets.token_urlsafe(32)
    # Without the workflow type the UI opens on its pages for agents.
    address = f"http://127.0.0.1:{options.port}/?token={token}#/{page}?workflowType=machine_learning"
    print(f"MLflow UI on {address} (Ctrl-C ends it)", flush=True)
    variables = os.environ | {TOKEN: token, STORE: environment.tracking_uri}
    arguments = ["--host", "127.0.0.1", "--port", str(options.port)]
    os.execve(sys.executable, [sys.executable, "-P", "-m", "paceline.tasks.track.serve", *arguments], variables)
