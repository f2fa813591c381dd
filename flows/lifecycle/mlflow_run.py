"""MLflow runs that end with their true status whatever happens to the flow."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from prefect import get_run_logger
from prefect.runtime import flow_run

from paceline.conf.config import Config
from paceline.conf.environment import Environment
from paceline.flows.lifecycle.mlflow_views import deployment_tags
from paceline.flows.lifecycle.signals import defer_signals, is_interruption
from paceline.tasks.errors import InputError, StoppedError
from paceline.tasks.track import run as tracking
from paceline.tasks.track.metrics_upload import deliver_left, deliver_rest
from paceline.tasks.track.queries import FoundRun, find_runs
from paceline.tasks.track.run import Role, RunHandle
from paceline.tasks.train.launch.run_lock import is_locked, run_lock


@contextmanager
def new_run(
    config: Config, environment: Environment, experiment_id: str, role: Role, workload: str = ""
) -> Iterator[RunHandle]:
    """A new run with its parameters; FINISHED, FAILED or KILLED at the end of the body."""
    close_abandoned_runs(environment, config.track.experiment)
    tags = {
        "paceline.role": role,
        "paceline.workload": workload,
        HOST_TAG: socket.gethostname(),
        "prefect.flow_run_id": str(flow_run.get_id() or ""),
        **deployment_tags(),
    }
    name = config.name if role == "run" else f"{role} {config.name}"
    with ExitStack() as stack:
        with defer_signals():
            handle = tracking.begin(environment.tracking_uri, experiment_id, config, tags, name=name)
            way_on = f"paceline {role} --resume {handle.run_id}" if role in RESUMABLE else None
            stack.enter_context(_locked(handle, environment.root, way_on))
        tracking.log_config(handle, config)
        yield handle


@contextmanager
def nested_run(
    parent: RunHandle, config: Config, name: str, role: tracking.NestedRole = "arm", run_id: str | None = None
) -> Iterator[RunHandle]:
    """A run inside another one. Interrupted with its parent; failing, or being stopped, alone.

    Args:
        parent: The study or sweep.
        config: Its own.
        name: Its own.
        role: What it is of its parent: one arm of a study, or one trial of a sweep.
        run_id: Of the run that goes on; None for a new one.
    """
    tags = {
        "paceline.role": role,
        tracking.PARENT_ID_TAGS[role]: parent.run_id,
        HOST_TAG: socket.gethostname(),
        tracking.PARENT_TAG: parent.run_id,
        "prefect.flow_run_id": str(flow_run.get_id() or ""),
    }
    with ExitStack() as stack:
        with defer_signals():
            if run_id is None:
                handle = tracking.begin(parent.tracking_uri, parent.experiment_id, config, tags, name=name)
            else:
                handle = parent.model_copy(update={"run_id": run_id})
                tracking.revive(handle, tags)
            stack.enter_context(_ends_with_status(handle, None))
        if run_id is None:
            tracking.log_config(handle, config)
        yield handle


@contextmanager
def resume_run(environment: Environment, run_id: str, role: Role, workload: str | None = None) -> Iterator[RunHandle]:
    """An unfinished run that goes on.

    Raises:
        InputError: it is finished, of another role, or its data have changed since.
    """
    handle, _ = tracking.reopen(environment.tracking_uri, run_id)
    found = tracking.tag(handle, "paceline.role")
    if found != role:
        raise InputError(
            f"--resume {run_id}: that is a run of paceline {found}; use paceline {found} --resume {run_id}"
        )
    if workload is not None:
        _check_same_workload(handle, workload)
    close_abandoned_runs(environment, handle.experiment)
    with _locked(handle, environment.root, f"paceline {role} --resume {run_id}"):
        tags = {"prefect.flow_run_id": str(flow_run.get_id() or ""), HOST_TAG: socket.gethostname()}
        tracking.revive(handle, tags | ({"paceline.workload": workload} if workload else {}))
        yield handle


@contextmanager
def _locked(handle: RunHandle, home: Path, way_on: str | None) -> Iterator[None]:
    """One process at a time; the lock refuses before anything of the run is changed."""
    get_run_logger().info("MLflow run %s in %s", handle.run_id, handle.experiment)
    with run_lock(home / "runs" / handle.run_id), _ends_with_status(handle, way_on):
        yield


@contextmanager
def _ends_with_status(handle: RunHandle, way_on: str | None) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        stopped = isinstance(error, StoppedError)
        failed = isinstance(error, Exception) and not stopped and not is_interruption(error)
        interrupted = "interrupted" + (f"; go on with: {way_on}" if way_on else "")  # or a cancelled flow
        _finish(handle, "FAILED" if failed else "KILLED", str(error) if failed or stopped else interrupted)
        raise
    deliver_left(handle.tracking_uri, handle.run_id, get_run_logger().warning)
    with defer_signals():
        tracking.finish(handle, "FINISHED")


def _finish(handle: RunHandle, status: tracking.Status, error: str) -> None:
    """End the run without hiding the error that ended it."""
    try:
        with defer_signals():
            tracking.finish(handle, status, error)
    except Exception:  # noqa: BLE001  the store may be what failed; the first error is the one to tell
        get_run_logger().exception("MLflow run %s could not be set %s", handle.run_id, status)


def _check_same_workload(handle: RunHandle, workload: str) -> None:
    before = tracking.tag(handle, "paceline.workload")
    if before and before != workload:  # none is known of a run whose preparation failed
        raise InputError(
            f"--resume {handle.run_id}: its workload was {before} and is now {workload}; "
            "the data, the package of the model, or the weights that it began with, have changed since: start a new run"
        )


HOST_TAG = "paceline.host"
RESUMABLE = ("run", "study", "sweep", "no-gpu")
MIN_AGE_SECONDS = 30.0
"""A younger run may be about to take its lock."""


def close_abandoned_runs(environment: Environment, experiment: str) -> None:
    """End the runs of this host whose owner has let go of their lock without having ended them.

    Args:
        environment: whose state directory holds the locks.
        experiment: name.
    """
    mine = f"attributes.status = 'RUNNING' and tags.`{HOST_TAG}` = '{socket.gethostname()}'"
    for run in find_runs(environment.tracking_uri, experiment, mine):
        is_settled = time.time() - run.start_time > MIN_AGE_SECONDS
        if is_settled and is_locked(_directory(environment, run)) is False:
            _end(environment, experiment, run)


def _end(environment: Environment, experiment: str, run: FoundRun) -> None:
    handle = RunHandle(
        tracking_uri=environment.tracking_uri, experiment=experiment, experiment_id="", run_id=run.run_id
    )
    with suppress(InputError), run_lock(_directory(environment, run)):  # or somebody has just taken it up
        if handle.client.get_run(run.run_id).info.status == "RUNNING":
            role = run.tags.get("paceline.role")
            way_on = f"; go on with: paceline {role} --resume {run.run_id}" if role in RESUMABLE else ""
            warn = get_run_logger().warning
            deliver_rest(environment.root / "runs" / run.run_id, environment.tracking_uri, run.run_id, warn)
            tracking.finish(handle, "KILLED", f"its process had gone without a word{way_on}")
            warn("MLflow run %s was left RUNNING by a process that is gone: KILLED", run.run_id)


def _directory(environment: Environment, run: FoundRun) -> Path:
    """Where the lock lies: an arm is owned with its study."""
    owner = run.tags.get(tracking.PARENT_TAG, run.run_id)
    # A tag is anybody's text who can write to the store.
    return environment.root / "runs" / (owner if owner.isalnum() else run.run_id)
