"""MLflow's own clean-up, which removes deleted runs and their artifacts for ever."""

import os
import subprocess
import sys

from paceline.tasks.redact import redact
from paceline.tasks.track.queries import take_inventory

DAYS = 30  # for which a deleted run can be restored
PROGRAM = f"""
import os
from mlflow.cli import gc
gc(["--older-than", "{DAYS}d", "--backend-store-uri", os.environ["MLFLOW_BACKEND_STORE_URI"]])
"""
"""`mlflow gc` takes the address of the database, password included, on its command line only."""


def remove_deleted_runs(tracking_uri: str, database: str | None) -> str:
    """Remove the runs and experiments that were deleted more than 30 days ago; return the outcome.

    A server does not do this for its clients, so `database` is that behind it, where it has one.
    """
    if database is None and tracking_uri.startswith("http"):
        return "skipped: set MLFLOW_BACKEND_STORE_URI to the database of the server, or run mlflow gc there"
    before = take_inventory(tracking_uri)
    if not before.deleted:
        return "no run is deleted"
    if owners := sorted(before.deleted & before.models.keys()):
        model = before.models[owners[0]]
        return f"skipped: the deleted run {owners[0]} has the model {model}; restore the run, or delete the version"
    uris = {"MLFLOW_TRACKING_URI": tracking_uri, "MLFLOW_BACKEND_STORE_URI": database or tracking_uri}
    command = [sys.executable, "-P", "-c", PROGRAM]
    done = subprocess.run(command, env=os.environ | uris, stdout=2, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        return f"failed: {redact(' '.join(done.stderr.split()))[-300:]}"
    num_left = len(take_inventory(tracking_uri).deleted)
    return f"removed {len(before.deleted) - num_left} deleted runs; {num_left} of the last {DAYS} days stay"
