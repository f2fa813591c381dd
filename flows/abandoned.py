"""Runs that MLflow calls RUNNING though their flow is gone, as after kill -9: the next command sets them right."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from pathlib import Path

from prefect import get_run_logger

from conf.environment import Site
from tasks.errors import InputError
from tasks.track import run as tracking
from tasks.track.metrics_upload import deliver_rest
from tasks.track.run import RunHandle
from tasks.track.queries import FoundRun, find_runs
from tasks.train.launch.run_lock import is_owned, own

HOST_TAG = "paceline.host"
RESUMABLE = ("run", "study", "sweep", "no-gpu")
MIN_AGE_SECONDS = 30.0
"""A younger run may be about to take its lock."""


def set_right(site: Site, experiment: str) -> None:
    """End the runs of this host whose owner has let go of their lock without having ended them.

    Args:
        site: whose state directory holds the locks.
        experiment: name.
    """
    mine = f"attributes.status = 'RUNNING' and tags.`{HOST_TAG}` = '{socket.gethostname()}'"
    for run in find_runs(site.tracking_uri, experiment, mine):
        is_settled = time.time() - run.start_time > MIN_AGE_SECONDS
        if is_settled and is_owned(_directory(site, run)) is False:
            _end(site, experiment, run)


def _end(site: Site, experiment: str, run: FoundRun) -> None:
    handle = RunHandle(tracking_uri=site.tracking_uri, experiment=experiment, experiment_id="", run_id=run.run_id)
    with suppress(InputError), own(_directory(site, run)):  # or somebody has just taken it up
        if handle.client.get_run(run.run_id).info.status == "RUNNING":
            role = run.tags.get("paceline.role")
            way_on = f"; go on with: paceline {role} --resume {run.run_id}" if role in RESUMABLE else ""
            warn = get_run_logger().warning
            deliver_rest(site.root / "runs" / run.run_id, site.tracking_uri, run.run_id, warn)
            tracking.finish(handle, "KILLED", f"its process had gone without a word{way_on}")
            warn("MLflow run %s was left RUNNING by a process that is gone: KILLED", run.run_id)


def _directory(site: Site, run: FoundRun) -> Path:
    """Where the lock lies: an arm is owned with its study."""
    owner = run.tags.get(tracking.PARENT_TAG, run.run_id)
    # A tag is anybody's text who can write to the store.
    return site.root / "runs" / (owner if owner.isalnum() else run.run_id)
