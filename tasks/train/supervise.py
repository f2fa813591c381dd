"""What runs on a Dask worker: a task that starts one rank as a fresh process and stays with it to its end.

A rank never runs in the worker's own thread: torch's process group, signal handlers and DataLoader workers need a
process of their own, and a fresh process can be killed without losing the worker. Knows nothing of training.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil

from tasks.records import RankSpec, Record
from tasks.train.launch import rank_command, rank_environment

POLL_SECONDS = 0.1
GRACE_SECONDS = 1.5
LOG_TAIL_CHARACTERS = 4000


class RankOutcome(Record):
    """How a rank ended."""

    rank: int
    returncode: int
    result: dict[str, Any] | None
    """Content of its result.json, None if it failed."""
    error: str | None
    """Last line of its own error, None if it raised none."""
    traceback: str
    """Its own traceback, else the end of its log."""
    failed_at: float | None
    """Unix time of its own error, for finding the first of several."""
    wall_seconds: float


def progress_topic(run_id: str) -> str:
    """Dask event topic on which rank 0's progress travels to the coordinator."""
    return f"paceline-progress-{run_id}"


def supervise(spec_json: str) -> RankOutcome:
    """Start a rank, forward its progress, and return how it ended.

    Ends the rank when this task is cancelled; the rank ends itself when this worker dies.

    Args:
        spec_json: a `RankSpec` as JSON.
    """
    spec = RankSpec.model_validate_json(spec_json)
    directory = Path(spec.directory)
    directory.mkdir(parents=True, exist_ok=True)
    spec_path = directory / "spec.json"
    spec_path.write_text(spec_json, encoding="utf-8")
    started = time.monotonic()
    process = _start(spec, spec_path)
    try:
        _stay_with(process, spec)
    finally:
        end_group(process)
    return _outcome(spec, process.returncode, time.monotonic() - started)


def _start(spec: RankSpec, spec_path: Path) -> subprocess.Popen[bytes]:
    environment = rank_environment(os.environ, spec.plan.num_threads, spec.interface, spec.devices)
    if spec.cold_compile:
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(spec_path.with_name("compile-cache"))
    environment["PACELINE_SPAWNED_AT"] = repr(time.monotonic())  # one clock for all processes of a host
    with (spec_path.parent / "log.txt").open("ab") as log:
        return subprocess.Popen(
            rank_command(spec_path),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # one group to kill, and a terminal's Ctrl-C reaches the coordinator alone
        )


def _stay_with(process: subprocess.Popen[bytes], spec: RankSpec) -> None:
    from distributed import get_worker
    from distributed.worker import thread_state  # type: ignore[attr-defined]

    worker, key = get_worker(), thread_state.key
    progress = Path(spec.directory) / "progress.json"
    seen = ""
    while process.poll() is None:
        task = worker.state.tasks.get(key)
        if task is None or task.state != "executing":
            return  # cancelled: by the coordinator, or because the coordinator is gone
        if spec.rank == 0 and progress.exists():
            text = progress.read_text(encoding="utf-8")
            if text != seen:
                seen = text
                worker.log_event(progress_topic(spec.run_id), json.loads(text))
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=POLL_SECONDS)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a rank and everything it started: ask, then kill."""
    if process.poll() is None:
        _signal_group(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE_SECONDS)
    _signal_group(process, signal.SIGKILL)  # the leader may be gone while its children are not
    process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _outcome(spec: RankSpec, returncode: int, wall_seconds: float) -> RankOutcome:
    directory = Path(spec.directory)
    result = _read_json(directory / "result.json") if returncode == 0 else None
    error = _read_json(directory / "error.json") or {}
    log = (directory / "log.txt").read_text(encoding="utf-8", errors="replace")
    message = error.get("message")
    if result is None and message is None:
        message = f"ended by {signal.Signals(-returncode).name}" if returncode < 0 else f"exit status {returncode}"
        message += _last_words(log)
    return RankOutcome(
        rank=spec.rank,
        returncode=returncode,
        result=result,
        error=None if result is not None else message,
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


def interface_of(address: str) -> str | None:
    """Name of this host's network interface that carries `address`, so that gloo does not offer 127.0.0.1 to others."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return name
    return None


def running_ranks(run_id: str) -> list[int]:
    """Process ids of this host's ranks of a run."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "tasks.train.worker" in command and any(f"/{run_id}/" in part for part in command):
            found.append(process.pid)
    return found
