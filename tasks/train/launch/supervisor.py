"""What runs on a Dask worker: a task that holds a device, starts one rank as a fresh process, and stays to its end.

A rank never runs in the worker's own thread: torch's process group, signal handlers and DataLoader workers need a
process of their own, and a fresh process can be killed without losing the worker.

The coordinator calls functions on the worker's event loop (`claim_status`, `send_spec`) at least every few seconds.
After `ORPHAN_SECONDS` without a call, the flow, the scheduler or the network is gone, and the supervisor ends the
rank. It knows nothing of training.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any, Literal

import psutil

from paceline.conf.environment import Environment
from paceline.tasks.errors import LostError
from paceline.tasks.files import write_durably
from paceline.tasks.records import RankSpec, Record
from paceline.tasks.train.launch.device_lock import DeviceLock, LockHolder
from paceline.tasks.train.launch.heartbeat import HeartbeatReader
from paceline.tasks.train.launch.rank_process import end_group, start_rank

POLL_SECONDS = 0.25
LEASE_BEAT_SECONDS = 2.0
ORPHAN_SECONDS = 10.0
LOG_TAIL_CHARACTERS = 4000


class RankOutcome(Record):
    """How a rank ended."""

    rank: int
    is_first: bool
    """The first one on its host, which measures for all of them."""
    returncode: int
    result: dict[str, Any] | None
    """Content of its result.json, None if it failed."""
    error: str | None
    """Last line of its own error, None if it raised none."""
    final: bool = False
    """The error is one that the rank raises on purpose, and would raise again."""
    too_many: int | None = None
    """Samples of a pass that its device had no memory for, where the error is that."""
    oom_stage: str | None = None
    """What was timed before the training when its device had no memory for that."""
    traceback: str
    """Its own traceback, else the end of its log."""
    failed_at: float | None
    """Unix time of its own error, for finding the first of several."""
    wall_seconds: float


class DeviceClaim(Record):
    """A rank's claim to a device, before there is anything to run."""

    key: str
    run_id: str
    rank: int
    device: str


class ClaimStatus(Record):
    """How a claim stands."""

    state: Literal["queued", "waiting", "held", "running"]
    """`queued`: the task has not begun; `waiting`: the device is another's; `held`: ours, to be told what to run."""
    owner: LockHolder | None = None
    """Whose the device is, while waiting."""
    step: int | None = None
    """Steps that the rank has done."""
    silent_seconds: float | None = None
    """Since the rank's last sign of life, or since its start before the first."""
    process_status: str | None = None
    """Of the operating system: running, sleeping, stopped, disk-sleep."""
    has_pulse: bool = False
    """There was a first sign of life."""


class _Watch:
    """What `claim_status` and `send_spec` see of a task; they run in the event loop's thread."""

    def __init__(self, claim: DeviceClaim) -> None:
        self.claim = claim
        self.asked = time.monotonic()
        self.owner: LockHolder | None = None
        self.held = False
        self.spec_json: str | None = None
        self.started: float | None = None
        self.pulse: HeartbeatReader | None = None
        self.pid: int | None = None

    def report(self) -> ClaimStatus:
        self.asked = time.monotonic()
        if self.started is None or self.pulse is None:
            return ClaimStatus(state="held" if self.held else "waiting", owner=self.owner)
        last = self.pulse.last_beat
        return ClaimStatus(
            state="running",
            step=self.pulse.step,
            silent_seconds=time.monotonic() - (last or self.started),
            process_status=_status(self.pid),
            has_pulse=last is not None,
        )

    def check_wanted(self) -> None:
        """Whether the task is still to go on.

        Raises:
            LostError: it was cancelled, or nobody asks for it.
        """
        from distributed import get_worker
        from distributed.worker import thread_state  # type: ignore[attr-defined]

        task = get_worker().state.tasks.get(thread_state.key)
        if task is None or task.state != "executing":
            state = task.state if task else "removed"
            raise LostError(f"the scheduler cancelled rank {self.claim.rank} (its task is {state})")
        silent = time.monotonic() - self.asked
        if silent > ORPHAN_SECONDS:
            raise LostError(
                f"the flow of rank {self.claim.rank} has not answered for {silent:.0f} s: it has ended or is cut off"
            )


_watches: dict[str, _Watch] = {}


def claim_status(key: str, device: str) -> ClaimStatus:
    """How the claim of that key to a device stands; to be run on its worker.

    One that stands in line behind another training of this very worker has not begun, and does not know whose it is.
    """
    watch, owner = _watches.get(key), None
    if watch is None:
        owner = DeviceLock(Environment().leases, device).owner()
        watch = _watches.get(key)  # it may have begun meanwhile, and the owner be itself
    return watch.report() if watch is not None else ClaimStatus(state="queued", owner=owner)


def send_spec(key: str, spec_json: str) -> None:
    """Have the holder of a claim run a rank; to be run on its worker.

    Args:
        key: of the claim.
        spec_json: a `RankSpec` as JSON.
    """
    _watches[key].asked = time.monotonic()
    _watches[key].spec_json = spec_json


def supervise(claim_json: str) -> RankOutcome:
    """Hold a device, start the rank that is ordered, forward its progress, and return how it ended.

    Ends the rank when this task is cancelled or nobody asks for it; the rank ends itself when this worker dies.

    Args:
        claim_json: a `DeviceClaim` as JSON.

    Raises:
        LostError: it was cancelled, or nobody asks for it.
    """
    claim = DeviceClaim.model_validate_json(claim_json)
    watch = _watches[claim.key] = _Watch(claim)
    lease = DeviceLock(Environment().leases, claim.device)
    try:
        return _run(_wait_for_order(watch, lease), lease, watch)
    finally:
        lease.release()
        del _watches[claim.key]


def _wait_for_order(watch: _Watch, lease: DeviceLock) -> str:
    while watch.spec_json is None:
        watch.check_wanted()
        if not watch.held:
            watch.held = lease.take(watch.claim.run_id, watch.claim.rank)
            watch.owner = None if watch.held else lease.owner()
        time.sleep(POLL_SECONDS / 5)
    return watch.spec_json


def _run(spec_json: str, lease: DeviceLock, watch: _Watch) -> RankOutcome:
    spec = RankSpec.model_validate_json(spec_json)
    directory = Path(spec.directory)
    directory.mkdir(parents=True, exist_ok=True)
    spec_path = directory / "spec.json"
    write_durably(spec_path, spec_json.encode())
    started = time.monotonic()
    pulse = watch.pulse = HeartbeatReader()
    try:
        process = start_rank(spec, spec_path, lease, pulse)
        watch.pid, watch.started = process.pid, started
        try:
            _stay_with(process, spec, lease, watch)
        finally:
            end_group(process)
        pulse.read()
    finally:
        watch.started = watch.pulse = None
        pulse.close()
    return _outcome(spec, process.returncode, pulse.final_error or {}, time.monotonic() - started)


def _stay_with(process: subprocess.Popen[bytes], spec: RankSpec, lease: DeviceLock, watch: _Watch) -> None:
    """Until the rank ends. Sleeps in the kernel: ranks need the processor.

    Raises:
        LostError: it is not wanted any more.
    """
    assert watch.pulse is not None
    progress = _Progress(spec)
    ended = os.pidfd_open(process.pid)
    try:
        events = select.poll()
        events.register(ended, select.POLLIN)
        next_beat = 0.0
        while process.poll() is None:
            watch.check_wanted()
            events.poll(POLL_SECONDS * 1000)
            watch.pulse.read()
            progress.forward()
            if time.monotonic() > next_beat:
                next_beat = time.monotonic() + LEASE_BEAT_SECONDS
                lease.beat()
    finally:
        os.close(ended)


class _Progress:
    """Forwards rank 0's progress file to the coordinator as Dask events."""

    def __init__(self, spec: RankSpec) -> None:
        self._path = Path(spec.directory) / "progress.json" if spec.rank == 0 else None
        self._topic = progress_topic(spec.run_id)
        self._seen = ""

    def forward(self) -> None:
        """Once for each change."""
        from distributed import get_worker

        if self._path is None or not self._path.exists():
            return
        text = self._path.read_text(encoding="utf-8")
        if text != self._seen:
            self._seen = text
            get_worker().log_event(self._topic, json.loads(text))


def progress_topic(run_id: str) -> str:
    """Dask event topic on which rank 0's progress travels to the coordinator."""
    return f"paceline-progress-{run_id}"


def _status(pid: int | None) -> str | None:
    with contextlib.suppress(psutil.NoSuchProcess):
        return str(psutil.Process(pid).status())
    return None


def _outcome(spec: RankSpec, returncode: int, error: dict[str, Any], wall_seconds: float) -> RankOutcome:
    directory = Path(spec.directory)
    result = _read_json(directory / "result.json") if returncode == 0 else None
    log = (directory / "log.txt").read_text(encoding="utf-8", errors="replace")
    message = error.get("message")
    if result is None and message is None:
        message = f"ended by {signal.Signals(-returncode).name}" if returncode < 0 else f"exit status {returncode}"
        message += _last_words(log)
    return RankOutcome(
        rank=spec.rank,
        is_first=spec.local_rank == 0,
        returncode=returncode,
        result=result,
        error=None if result is not None else message,
        final=bool(error.get("final")),
        too_many=error.get("too_many"),
        oom_stage=error.get("oom_stage"),
        traceback=error.get("traceback") or log[-LOG_TAIL_CHARACTERS:],
        failed_at=error.get("time"),
        wall_seconds=wall_seconds,
    )


def _last_words(log: str) -> str:
    """What a process that was killed by its own fault said first: glibc's or faulthandler's line."""
    said = [line for line in log.splitlines() if "Fatal Python error" in line or line.startswith(("free()", "malloc"))]
    return f" ({said[0][:200]})" if said else ""


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def free_port() -> int:
    """A TCP port that is free on this host now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
