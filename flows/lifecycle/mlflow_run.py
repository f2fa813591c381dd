"""MLflow runs that end with their true status whatever happens to the flow, and the requests that some carry."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

from prefect import get_run_logger
from prefect.logging import get_logger
from prefect.runtime import deployment, flow_run
from pydantic import BaseModel

from paceline.conf.config import Config
from paceline.conf.environment import Environment
from paceline.flows.lifecycle.prefect_api import wait_for_api
from paceline.flows.lifecycle.signals import defer_signals, is_interruption
from paceline.tasks.errors import InputError, RankError, StoppedError, SupersededError
from paceline.tasks.fingerprint import code_fingerprint
from paceline.tasks.log_lines import labels
from paceline.tasks.names import Artifact, Status, Tag
from paceline.tasks.track import run as tracking
from paceline.tasks.track.environment import package_versions
from paceline.tasks.track.metrics_upload import upload_left, upload_rest
from paceline.tasks.track.queries import FoundRun, find_runs, read_document
from paceline.tasks.track.run import Role, RunHandle
from paceline.tasks.track.store import sqlite_path
from paceline.tasks.train.launch.run_lock import is_locked, run_lock

Kind = Literal["study", "sweep", "no-gpu"]
ARTIFACTS = {"study": Artifact.STUDY_REQUEST, "sweep": Artifact.SWEEP_REQUEST, "no-gpu": Artifact.NO_GPU_REQUEST}
RESUMABLE = ("run", *ARTIFACTS)
FLOW_RUN_TAG = "prefect.flow_run_id"
DEPLOYMENT_TAG = "prefect.deployment_id"
DEPLOYMENT_NAME_TAG = "prefect.deployment_name"
MIN_AGE_SECONDS = 30.0  # younger runs may not have their lock yet
TRACEBACK_CHARACTERS = 4000  # of the 5000 that a tag has


@contextmanager
def new_run(
    config: Config, environment: Environment, experiment_id: str, role: Role, workload: str = ""
) -> Iterator[RunHandle]:
    """Create a run with its parameters; it is FINISHED, FAILED or KILLED at the end of the body."""
    close_abandoned_runs(environment, config.track.experiment)
    wait_for_api()  # Prefect's names of the deployment and of the run
    tags = {Tag.ROLE: role, Tag.WORKLOAD: workload, **_process_tags(), **_software_tags()}
    if deployed := deployment.get_id():
        tags |= {DEPLOYMENT_TAG: deployed, DEPLOYMENT_NAME_TAG: deployment.get_name() or deployed}
    name = config.name if role == "run" else f"{role} {config.name}"
    with ExitStack() as stack:
        with defer_signals():
            handle = tracking.begin(environment.tracking_uri, experiment_id, config, tags, name=name)
            try:
                stack.enter_context(_own_run(handle, environment.root, _resume_hint(role, handle.run_id)))
            except OSError as error:  # without a lock nobody sees later that no process has the run
                _finish(handle, "FAILED", str(error))
                raise
        tracking.log_config(handle, config)
        yield handle


@contextmanager
def nested_run(
    parent: RunHandle, config: Config, name: str, role: tracking.NestedRole = "arm", run_id: str | None = None
) -> Iterator[RunHandle]:
    """Create a run inside a study or a sweep, or resume the one of `run_id`; only a signal ends both."""
    tags = {Tag.ROLE: role, tracking.PARENT_ID_TAGS[role]: parent.run_id, Tag.PARENT: parent.run_id, **_process_tags()}
    with ExitStack() as stack:
        with defer_signals():
            if run_id is None:
                handle = tracking.begin(parent.tracking_uri, parent.experiment_id, config, tags, name=name)
            else:
                handle = parent.model_copy(update={"run_id": run_id})
                tracking.revive(handle, tags)
            stack.enter_context(ends_with_status(handle, ""))
        if run_id is None:
            tracking.log_config(handle, config)
        yield handle


@contextmanager
def open_run(
    role: Role,
    config: Config,
    environment: Environment,
    experiment_id: str,
    workload: str,
    resume: str | None,
    request: BaseModel | None = None,
) -> Iterator[RunHandle]:
    """Create a run, with the request from which a resume reads what was asked for; or resume the run of an id.

    Raises InputError: the run of that id is finished, has another role, or its data have changed.
    """
    if resume is None:
        with new_run(config, environment, experiment_id, role, workload) as handle:
            if request is not None:
                tracking.log_document(handle, ARTIFACTS[role], request.model_dump(mode="json"))
            yield handle
        return
    handle, _ = tracking.reopen(environment.tracking_uri, resume)
    stored_role = tracking.tag(handle, Tag.ROLE)
    if stored_role != role:
        fault = f"--resume {resume}: that is a run of paceline {stored_role}"
        raise InputError(f"{fault}; use paceline {stored_role} --resume {resume}")
    before = tracking.tag(handle, Tag.WORKLOAD)
    if workload and before and before != workload:  # a run whose preparation failed has none
        raise InputError(
            f"--resume {resume}: its workload was {before} and is now {workload}; "
            "the data, the package of the model, or the weights that it began with, have changed since: start a new run"
        )
    close_abandoned_runs(environment, handle.experiment)
    with _own_run(handle, environment.root, _resume_hint(role, resume)):
        software = _software_tags()
        first = {name: tracking.tag(handle, name) or now for name, now in software.items()}
        tags = _process_tags() | first | ({Tag.WORKLOAD: workload} if workload else {})
        if changed := "; ".join(f"{first[name]} -> {now}" for name, now in software.items() if first[name] != now):
            tags[Tag.RESUMED_WITH] = changed
            warning = "--resume %s: Paceline or its packages changed, and the measured speed mixes both: %s"
            get_run_logger().warning(warning, resume, changed)
        tracking.revive(handle, tags)
        yield handle


def load_request(kind: Kind, environment: Environment, run_id: str) -> dict[str, Any]:
    """Read the request of an unfinished run; raise InputError if it is finished or of another kind."""
    tracking.reopen(environment.tracking_uri, run_id)
    document: dict[str, Any] | None = read_document(environment.tracking_uri, run_id, ARTIFACTS[kind])
    if document is None:
        raise InputError(f"--resume {run_id}: that run is not a {kind}; use paceline run --resume")
    return document


def _resume_hint(role: str | None, run_id: str) -> str:
    return f"; resume with: paceline {role} --resume {run_id}" if role in RESUMABLE else ""


def _process_tags() -> dict[str, str]:
    return {Tag.HOST: socket.gethostname(), FLOW_RUN_TAG: str(flow_run.get_id() or "")}


def _software_tags() -> dict[str, str]:
    versions = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    return {Tag.CODE: f"code {code_fingerprint()}", Tag.VERSIONS: versions}


@contextmanager
def _own_run(handle: RunHandle, home: Path, resume_hint: str) -> Iterator[None]:
    """Lock the run for this process; a refusal changes nothing of the run."""
    labels["run_id"] = handle.run_id
    get_run_logger().info("MLflow run %s in %s", handle.run_id, handle.experiment)
    with run_lock(home / "runs" / handle.run_id), ends_with_status(handle, resume_hint):
        yield


@contextmanager
def ends_with_status(handle: RunHandle, resume_hint: str) -> Iterator[None]:
    """Set the run FINISHED, FAILED or KILLED at the end of the body."""
    try:
        yield
    except SupersededError:  # the process that has superseded this one sets the status
        raise
    except BaseException as error:
        stopped = isinstance(error, StoppedError)
        failed = isinstance(error, Exception) and not stopped and not is_interruption(error)
        reason = _describe(error) if failed or stopped else f"interrupted{resume_hint}"  # or a cancelled flow
        _finish(handle, "FAILED" if failed else "KILLED", reason)
        raise
    upload_left(handle.tracking_uri, handle.run_id)
    with defer_signals():
        tracking.finish(handle, "FINISHED")


def _describe(error: BaseException) -> str:
    """The message, and the end of the traceback of the rank that has failed."""
    found = error.rank_traceback.strip() if isinstance(error, RankError) else ""
    return f"{error}\n\n{found[-TRACEBACK_CHARACTERS:]}" if found else str(error)


def _finish(handle: RunHandle, status: Status, error: str) -> None:
    """Set the status without hiding the error that ended the run."""
    try:
        with defer_signals():
            tracking.finish(handle, status, error)
    except Exception:  # noqa: BLE001  the store may have failed; report the first error
        get_logger("paceline").exception("MLflow run %s could not be set %s", handle.run_id, status)


def close_abandoned_runs(environment: Environment, experiment: str | None, flow_run_id: UUID | None = None) -> None:
    """End RUNNING runs of this host whose process is gone: of an experiment, or those of a flow run that lost it."""
    mine = f"attributes.status = 'RUNNING' and tags.`{Tag.HOST}` = '{socket.gethostname()}'"
    if flow_run_id is not None:
        file = sqlite_path(environment.tracking_uri)
        if file is not None and not file.exists():
            return
        mine += f" and tags.`{FLOW_RUN_TAG}` = '{flow_run_id}'"
    for run in find_runs(environment.tracking_uri, experiment, mine, is_patient=flow_run_id is None):
        directory = _directory(environment, run)
        is_held = is_locked(directory)
        is_new = time.time() - run.start_time <= MIN_AGE_SECONDS or is_held is None
        if is_held or (is_new and flow_run_id is None):
            continue
        handle = RunHandle(
            tracking_uri=environment.tracking_uri, experiment=experiment or "", experiment_id="", run_id=run.run_id
        )
        warn = get_logger("paceline").warning
        with suppress(InputError), run_lock(directory):  # another process may just have resumed it
            if handle.client.get_run(run.run_id).info.status == "RUNNING":
                upload_rest(environment.root / "runs" / run.run_id, environment.tracking_uri, run.run_id)
                hint = _resume_hint(run.tags.get(Tag.ROLE), run.run_id)
                tracking.finish(handle, "KILLED", f"its process is gone{hint}")
                warn("MLflow run %s was left RUNNING by a process that is gone: KILLED", run.run_id)


def _directory(environment: Environment, run: FoundRun) -> Path:
    """Directory of the lock: arms and trials share that of their parent."""
    owner = run.tags.get(Tag.PARENT, run.run_id)
    # Everybody who can write to the store can write this tag.
    return environment.root / "runs" / (owner if owner.isalnum() else run.run_id)
