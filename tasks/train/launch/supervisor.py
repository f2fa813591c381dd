"""Supervisor of a rank: a Dask task that holds a device, starts the rank as a process and waits for its end.

A process of its own, because torch's process group, signal handlers and DataLoader workers need one, and because it can
be killed without losing the worker. The coordinator calls `claim_status` and `send_spec` on the worker's event loop
every few seconds. After `ORPHAN_SECONDS` without a call, the flow, the scheduler or the network is gone, and the
supervisor stops the rank.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
from pydantic import Field

from paceline.conf.environment import Environment
from paceline.tasks.errors import LostError
from paceline.tasks.files import write_durably
from paceline.tasks.measure.energy import idle_watts
from paceline.tasks.records.record import Record
from paceline.tasks.train.launch.device_lock import DeviceLock, LockHolder
from paceline.tasks.train.launch.heartbeat import HeartbeatReader
from paceline.tasks.train.launch.rank_process import RankProcess, end_group, start_rank
from paceline.tasks.train.rank_spec import RankSpec

POLL_SECONDS = 0.25
LOCK_UPDATE_SECONDS = 2.0
ORPHAN_SECONDS = 10.0
LOG_TAIL_CHARACTERS = 4000
PROGRESS_TOPIC = "paceline-progress-"  # with the run's id, the Dask event topic of rank 0's progress


class RankOutcome(Record):
    """Outcome of a rank."""

    rank: int
    is_first: bool  # the first rank on its host, which measures for all of them
    result: dict[str, Any] | None  # content of result.json; None if the rank failed
    error: str | None  # last line of the rank's error; None if it raised none
    causes: dict[str, Any] = Field(default_factory=dict)
    """What the rank knows of its error, as keyword arguments of `RankError`."""
    traceback: str  # the rank's traceback, else the end of its log
    failed_at: float | None  # Unix time of the error, to order several
    wall_seconds: float
    idle_watts: float | None = None
    """Power of the host's GPUs and processors before its ranks started; None after a resume or without a counter."""


class ClaimStatus(Record):
    """Status of a claim to a device."""

    state: Literal["queued", "waiting", "held", "running"]
    """`queued`: the task has not started; `waiting`: the device is in use; `held`: ready for a spec."""
    owner: LockHolder | None = None  # holder of the device, while waiting
    step: int | None = None  # step that the rank has reached
    silent_seconds: float | None = None  # since the rank's last heartbeat, or since its start before the first
    process_status: str | None = None  # state by the operating system: running, sleeping, stopped, disk-sleep
    has_heartbeat: bool = False  # the rank has sent a first heartbeat


@dataclass
class _Watch:
    """State of a task, which `claim_status` and `send_spec` read and change in the event loop's thread."""

    rank: int
    last_call: float = field(default_factory=time.monotonic)
    owner: LockHolder | None = None
    held: bool = False
    spec_json: str | None = None
    started: float | None = None
    heartbeat: HeartbeatReader | None = None
    pid: int | None = None

    def report(self) -> ClaimStatus:
        self.last_call = time.monotonic()
        if self.started is None or self.heartbeat is None:
            return ClaimStatus(state="held" if self.held else "waiting", owner=self.owner)
        last = self.heartbeat.last_beat
        status = None
        with contextlib.suppress(psutil.NoSuchProcess):
            status = psutil.Process(self.pid).status() if self.pid is not None else None
        return ClaimStatus(
            state="running",
            step=self.heartbeat.step,
            silent_seconds=time.monotonic() - (last or self.started),
            process_status=status,
            has_heartbeat=last is not None,
        )

    def check_coordinator(self) -> None:
        """Raise LostError if the task was cancelled or the coordinator has stopped calling."""
        from distributed import get_worker
        from distributed.worker import thread_state  # type: ignore[attr-defined]

        task = get_worker().state.tasks.get(thread_state.key)
        if task is None or task.state != "executing":
            raise LostError(f"the supervisor of rank {self.rank} was {task.state if task else 'released'}")
        silent = time.monotonic() - self.last_call
        if silent > ORPHAN_SECONDS:
            raise LostError(f"rank {self.rank}: no heartbeat from the coordinator for {silent:.0f} s; stopping it")


_watches: dict[str, _Watch] = {}


def claim_status(key: str, device: str) -> ClaimStatus:
    """Status of a claim to a device; runs on its worker."""
    watch, owner = _watches.get(key), None
    if watch is None:  # queued behind another training of the worker, it has no task yet: the lock names the holder
        owner = DeviceLock(Environment().leases, device).owner()
        watch = _watches.get(key)  # the task may have started meanwhile and hold the device itself
    return watch.report() if watch is not None else ClaimStatus(state="queued", owner=owner)


def send_spec(key: str, spec_json: str) -> None:
    """Pass the claim's holder a `RankSpec` as JSON to run; runs on its worker."""
    _watches[key].last_call = time.monotonic()
    _watches[key].spec_json = spec_json


def supervise(key: str, run_id: str, rank: int, device: str) -> RankOutcome:
    """Hold a device, start the rank of the spec that arrives, forward its progress, and return its outcome.

    Stops the rank when this task is cancelled or the coordinator is gone; the rank stops itself when this worker dies.
    Raises LostError: the task was cancelled, or the coordinator is gone.
    """
    watch = _watches[key] = _Watch(rank)
    device_lock = DeviceLock(Environment().leases, device)
    try:
        while watch.spec_json is None:
            watch.check_coordinator()
            if not watch.held:
                watch.held = device_lock.take(run_id, rank)
                watch.owner = None if watch.held else device_lock.owner()
            time.sleep(POLL_SECONDS / 5 if watch.held else POLL_SECONDS)
        return _run(watch.spec_json, device_lock, watch)
    finally:
        device_lock.release()
        del _watches[key]


def _run(spec_json: str, device_lock: DeviceLock, watch: _Watch) -> RankOutcome:
    spec = RankSpec.model_validate_json(spec_json)
    directory = Path(spec.directory)
    directory.mkdir(parents=True, exist_ok=True)
    spec_path = directory / "spec.json"
    write_durably(spec_path, spec_json.encode())
    # Each rank waits for it, so that none starts meanwhile.
    watts = None if spec.measurement or spec.resume_from else idle_watts(spec.devices)
    started = time.monotonic()
    heartbeat = watch.heartbeat = HeartbeatReader()
    try:
        watch.started = started  # a slow start is one of the rank: see the coordinator's limits
        process = start_rank(spec, spec_path, device_lock, heartbeat)
        watch.pid = process.pid
        try:
            _wait_for_end(process, spec, device_lock, watch)
        finally:
            end_group(process)
        heartbeat.read()
    finally:
        watch.started = watch.heartbeat = None
        os.close(heartbeat.reading)
    return _outcome(spec, process.wait(), heartbeat.final_error or {}, time.monotonic() - started, watts)


def _wait_for_end(process: RankProcess, spec: RankSpec, device_lock: DeviceLock, watch: _Watch) -> None:
    """Wait for the end of the rank, asleep in the kernel: ranks need the processor. Forward rank 0's progress."""
    from distributed import get_worker

    assert watch.heartbeat is not None
    progress, last_text = Path(spec.directory) / "progress.json", ""
    try:
        ended = os.pidfd_open(process.pid)
    except ProcessLookupError:  # a forked rank that has ended with its server
        return
    try:
        events = select.poll()
        events.register(ended, select.POLLIN)
        next_beat = 0.0
        while process.poll() is None:
            watch.check_coordinator()
            if events.poll(POLL_SECONDS * 1000):  # the status of a forked rank may follow later
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_SECONDS)
            watch.heartbeat.read()
            text = last_text
            if spec.rank == 0:
                with contextlib.suppress(OSError):  # not there yet, or replaced just now on a network file system
                    text = progress.read_text(encoding="utf-8")
            if text != last_text:
                last_text = text
                get_worker().log_event(PROGRESS_TOPIC + spec.run_id, json.loads(text))
            if time.monotonic() > next_beat:
                next_beat = time.monotonic() + LOCK_UPDATE_SECONDS
                os.utime(device_lock.fileno())  # shows people that the holder lives
    finally:
        os.close(ended)


def _outcome(
    spec: RankSpec, returncode: int, error: dict[str, Any], wall_seconds: float, watts: float | None
) -> RankOutcome:
    result_path = Path(spec.directory) / "result.json"
    result = json.loads(result_path.read_text(encoding="utf-8")) if returncode == 0 and result_path.exists() else None
    log = (result_path.parent / "log.txt").read_text(encoding="utf-8", errors="replace")
    message = error.get("message")
    if result is None and message is None:
        message = f"ended by {signal.Signals(-returncode).name}" if returncode < 0 else f"exit status {returncode}"
        # The first line of glibc or faulthandler about a crash.
        crashes = ("free()", "malloc")
        lines = (line for line in log.splitlines() if "Fatal Python error" in line or line.startswith(crashes))
        if crash := next(lines, ""):
            message += f" ({crash[:200]})"
    return RankOutcome(
        rank=spec.rank,
        is_first=spec.local_rank == 0,
        result=result,
        error=None if result is not None else message,
        causes=error.get("causes", {}),
        traceback=error.get("traceback") or log[-LOG_TAIL_CHARACTERS:],
        failed_at=error.get("time"),
        wall_seconds=wall_seconds,
        idle_watts=watts,
    )


def free_port() -> int:
    """Find a free TCP port of this host."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
