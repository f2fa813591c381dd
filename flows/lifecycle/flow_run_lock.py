"""Per-process lock of a Prefect flow run, which the kernel releases; repairs what runs without a process have left."""

import atexit
import os
import shutil
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from uuid import UUID

import psutil
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State, StateType
from prefect.exceptions import ObjectNotFound
from prefect.logging import get_logger
from prefect.settings import get_current_settings
from prefect.states import Cancelled, Crashed

from paceline.conf.environment import Environment
from paceline.flows.lifecycle.mlflow_run import close_abandoned_runs
from paceline.flows.lifecycle.overlap import HOLDING, active_runs, set_slots_right
from paceline.flows.lifecycle.promotion import promote_finished
from paceline.tasks.errors import InputError
from paceline.tasks.train.launch.run_lock import is_locked, run_lock

MIN_AGE_SECONDS = 5.0  # the process of a younger record may be about to take its lock
PROCESS = "process"  # file of a record: the ids of the process and of its parent at first
_held = ExitStack()
"""Never closed: Prefect sets the last state of a run after its flow has returned, and the lock has to outlast that."""
_owned: set[Path] = set()


def _records(environment: Environment) -> Path:
    """Directory of this host's records: one for each flow run whose process runs or was lost."""
    return environment.root / "flow-runs" / socket.gethostname()


def flow_run_lock(environment: Environment, flow_run_id: UUID) -> Path:
    """Lock a flow run until this process ends, and return its record; raise InputError if another process runs it."""
    record = _records(environment) / str(flow_run_id)
    if record in _owned:
        return record
    _held.enter_context(run_lock(record))
    _owned.add(record)
    (record / PROCESS).write_text(f"{os.getpid()} {os.getppid()}", encoding="utf-8")
    atexit.register(shutil.rmtree, record, ignore_errors=True)
    return record


def set_right(environment: Environment, deployment_id: str | None) -> None:
    """End flow runs of this host that lost their process, and free the slots of lost runs. Log errors."""
    records = _records(environment)
    try:
        if deployment_id is None and not any(map(_lost_process, records.glob("*"))):
            return
        end_lost_runs(environment)
        if deployment_id is not None:
            with get_client(sync_client=True) as client:
                for run in active_runs(client, UUID(deployment_id)):
                    if run.state_type == StateType.CANCELLING:
                        _stop_orphan(records / str(run.id))
                running = frozenset(UUID(record.name) for record in records.glob("*") if is_locked(record))
                set_slots_right(client, UUID(deployment_id), running)
    except Exception as error:  # noqa: BLE001  what others have left must not end this run
        get_logger("paceline").warning("What lost runs have left in Prefect could not be set right (%r)", error)


def _lost_process(record: Path) -> bool:
    try:
        age = time.time() - record.stat().st_mtime
    except FileNotFoundError:  # its process has just ended in order
        return False
    return age >= MIN_AGE_SECONDS and is_locked(record) is False


def _stop_orphan(record: Path) -> None:
    """Kill the process of a flow run that is to be cancelled, if the runner that would end it is gone.

    At SIGTERM Prefect would call the run CRASHED, since only its runner tells it of the cancellation. The guardian of
    the process sets the statuses.
    """
    with suppress(FileNotFoundError, psutil.NoSuchProcess):
        pid, parent = map(int, (record / PROCESS).read_text(encoding="utf-8").split())
        process = psutil.Process(pid)
        if is_locked(record) and process.ppid() != parent:
            process.kill()


def end_lost_runs(environment: Environment) -> None:
    """End the flow runs of this host that have lost their process.

    Locks of other hosts may be invisible here, so other hosts end their own runs.
    """
    for record in _records(environment).glob("*"):
        if _lost_process(record):
            with suppress(InputError):  # another process may have locked it just now, or MLflow is away
                end_lost_run(environment, record)


def end_lost_run(environment: Environment, record: Path) -> None:
    """Set a flow run that has lost its process CRASHED in Prefect, and its MLflow runs KILLED; promote a FINISHED one.

    A run in CANCELLING becomes CANCELLED, its only end in Prefect. An error of one API is raised after a call of
    the other one. Raises InputError: the process runs, or MLflow does not answer.
    """
    flow_run_id = UUID(record.name)
    with run_lock(record):
        try:
            is_over = _end_in_prefect(flow_run_id)
        finally:
            close_abandoned_runs(environment, None, flow_run_id)
            promote_finished(environment, flow_run_id)
        if is_over:
            shutil.rmtree(record, ignore_errors=True)


def _end_in_prefect(flow_run_id: UUID) -> bool:
    """End a flow run in Prefect; return False if this Prefect does not know it, such as that of another command."""
    if get_current_settings().api.url is None:  # the client would start a server
        return False
    with get_client(sync_client=True) as client:
        try:
            run = client.read_flow_run(flow_run_id)
        except ObjectNotFound:
            return False
        if run.state is not None and run.state.type in HOLDING:
            message = f"its process on {socket.gethostname()} is gone"
            is_cancelling = run.state.type == StateType.CANCELLING
            state: State = Cancelled(message=message) if is_cancelling else Crashed(message=message)
            client.set_flow_run_state(run.id, state)
            log = get_logger("paceline")
            log.warning("Flow run %s (%s) has lost its process: %s", run.name, run.id, state.name)
    return True
