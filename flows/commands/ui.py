"""`paceline ui`: the MLflow UI on the runs of this machine."""

from __future__ import annotations

import os
import secrets
import sys
from argparse import ArgumentParser, Namespace

from paceline.conf.environment import Environment
from paceline.tasks.errors import InputError
from paceline.tasks.track.connectivity import check_tracking_uri
from paceline.tasks.track.serve import STORE, TOKEN

HELP = "open the MLflow UI on the runs of this machine"


def add_arguments(parser: ArgumentParser) -> None:
    """Its options."""
    parser.add_argument("--port", type=int, default=5000, help="TCP port on loopback (default: 5000)")


def main(options: Namespace) -> None:
    """Become the server."""
    site = Environment()
    check_tracking_uri(site.tracking_uri)
    if site.tracking_uri.startswith("http"):
        print(site.tracking_uri)
        return
    if not site.tracking_uri_given and not (site.root / "mlflow.db").exists():
        raise InputError(f"PACELINE_HOME={site.root} holds no runs yet; run paceline run digits first")
    token = secrets.token_urlsafe(32)
    # Without the workflow type the UI opens on its pages for agents.
    page = f"http://127.0.0.1:{options.port}/?token={token}#/experiments?workflowType=machine_learning"
    print(f"MLflow UI on {page} (Ctrl-C ends it)", flush=True)
    environment = os.environ | {TOKEN: token, STORE: site.tracking_uri}
    arguments = ["--host", "127.0.0.1", "--port", str(options.port)]
    os.execve(sys.executable, [sys.executable, "-P", "-m", "paceline.tasks.track.serve", *arguments], environment)
