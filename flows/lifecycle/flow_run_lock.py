"""Which process runs a Prefect flow run: a lock that the kernel releases with it, and what becomes of runs without."""

from __future__ import annotations

import atexit
import shutil
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import State, StateType
from prefect.exceptions import ObjectNotFound
from prefect.logging import get_logger
from prefect.states import Cancelled, Crashed

from paceline.conf.environment import Environment
from paceline.tasks.errors import InputError
from paceline.tasks.train.launch.run_lock import is_locked, run_lock

MIN_AGE_SECONDS = 5.0
"""The process of a younger record may be about to take its lock."""
_held = ExitStack()
"""Never closed: the last state of a run is set after its flow has returned, and until then it has an owner."""
_owned: set[Path] = set()


def _directory(environment: Environment) -> Path:
    """Of the records of this host: one for each flow run that a process runs, or ran without an end in order."""
    return environment.root / "flow-runs" / socket.gethostname()


def _records(environment: Environment) -> list[Path]:
    directory = _directory(environment)
    return list(directory.iterdir()) if directory.is_dir() else []


def flow_run_lock(environment: Environment, flow_run_id: UUID) -> None:
    """Hold a flow run until this process ends, however it does.

    Args:
        environment: whose state directory holds the records.
        flow_run_id: of a run that this process runs.

    Raises:
        InputError: another process runs it now.
    """
    record = _directory(environment) / str(flow_run_id)
    if record in _owned:
        return
    _held.enter_context(run_lock(record))
    _owned.add(record)
    atexit.register(shutil.rmtree, record, ignore_errors=True)


def living(environment: Environment) -> frozenset[UUID]:
    """The flow runs that a process of this host runs now."""
    return frozenset(UUID(record.name) for record in _records(environment) if is_locked(record))


def has_abandoned(environment: Environment) -> bool:
    """Whether a process of this host is gone that ran a flow."""
    return any(_is_abandoned(record) for record in _records(environment))


def _is_abandoned(record: Path) -> bool:
    try:
        age = time.time() - record.stat().st_mtime
    except FileNotFoundError:  # its process has just ended in order
        return False
    return age >= MIN_AGE_SECONDS and is_locked(record) is False


def end_abandoned(environment: Environment, client: SyncPrefectClient) -> None:
    """Set the flow runs CRASHED whose process on this host is gone.

    Runs of other hosts are theirs to judge: their locks may not be seen from here. A run that was to be cancelled is
    CANCELLED: Prefect has no other end for it.

    Args:
        environment: whose state directory holds the records.
        client: of the server that may know the runs.
    """
    for record in _records(environment):
        if _is_abandoned(record):
            with suppress(InputError, ObjectNotFound), run_lock(record):  # somebody has just taken it; another server's
                _end(client, UUID(record.name))
                shutil.rmtree(record, ignore_errors=True)


def _end(client: SyncPrefectClient, flow_run_id: UUID) -> None:
    run = client.read_flow_run(flow_run_id)
    state = gone(run.state, f"its process on {socket.gethostname()} is gone")
    if state is not None:
        client.set_flow_run_state(flow_run_id, state)
        get_logger("paceline").warning("Flow run %s (%s) has lost its process: %s", run.name, run.id, state.name)


def gone(state: State | None, message: str) -> State | None:
    """The last state of a run without a process; None where it has one, or none is due."""
    if state is None or state.type not in (StateType.PENDING, StateType.RUNNING, StateType.CANCELLING):
        return None
    return Cancelled(message=message) if state.type == StateType.CANCELLING else Crashed(message=message)
