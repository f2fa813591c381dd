"""Process that outlives a process of flows: if that is killed, it sets the flow runs to their true status.

Until then it only waits, and has imported nothing but a little of Python.
"""

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

GRACE_SECONDS = 10.0
"""A runner reports a lost process itself, with its exit status, and ranks without a flow log for up to 10 s more."""
RETRY_SECONDS = 5.0
WAIT_SECONDS = 1800.0  # longest wait for APIs that are away
RESTART_SECONDS, MAX_RESTART_SECONDS = 1.0, 60.0  # between the end of a guardian and the next; longer where none lives
_records: list[Path] = []  # of this process's flow runs
_guardians: list[subprocess.Popen[bytes]] = []  # that of this process, once there is one
_lock = threading.Lock()
_is_ending = threading.Event()


def guard(record: Path) -> None:
    """Send the record of a flow run to the guardian of this process; start it before the first one."""
    with _lock:
        _records.append(record)
        if _guardians:
            _send(_guardians[0], record)
            return
        _guardians.append(_start())
    atexit.register(_end, os.getpid())
    threading.Thread(target=_restart, name="guardian", daemon=True).start()


def _start() -> subprocess.Popen[bytes]:
    guardian = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,  # a reader of this process's output must not wait for the guardian
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a signal to the process group or the terminal leaves it alone
        bufsize=0,
    )
    _send(guardian, *_records)
    return guardian


def _send(guardian: subprocess.Popen[bytes], *records: Path) -> None:
    assert guardian.stdin is not None
    with suppress(BrokenPipeError):  # somebody has just killed it, and the next one reads all records
        guardian.stdin.write("".join(f"{record}\n" for record in records).encode())


def _restart() -> None:
    """Start a new guardian each time somebody has killed it, until this process ends."""
    pause = RESTART_SECONDS
    while True:
        guardian, started = _guardians[0], time.monotonic()
        guardian.wait()
        if time.monotonic() - started > MAX_RESTART_SECONDS:
            pause = RESTART_SECONDS
        time.sleep(pause)
        pause = min(2 * pause, MAX_RESTART_SECONDS)
        with _lock, suppress(OSError):  # no memory or process id is free: tried again
            if _is_ending.is_set():
                return
            _guardians[0] = _start()
            guardian.communicate()  # closes the pipe


def _end(owner: int) -> None:
    """End the guardian with a process that ends in order; it belongs to the process of that id, no copy of it."""
    if os.getpid() != owner:
        return
    with _lock:
        _is_ending.set()
        _guardians[0].kill()
    _guardians[0].wait()


def main() -> None:
    """Read records of flow runs from stdin until their process has ended; then end those that are still there."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end_runs([Path(line) for line in dict.fromkeys(sys.stdin.read().splitlines())])


def end_runs(records: list[Path]) -> None:
    """End the flow runs whose records a lost process has left, and wait for APIs that are away."""
    time.sleep(GRACE_SECONDS)
    deadline = time.monotonic() + WAIT_SECONDS
    while (records := [record for record in records if record.exists()]) and time.monotonic() < deadline:
        from paceline.conf.environment import Environment, quieten

        quieten()
        from paceline.flows.lifecycle.flow_run_lock import end_lost_run

        for record in records[:]:
            with suppress(Exception):  # Prefect's or MLflow's API is away
                end_lost_run(Environment(), record)
                records.remove(record)
        time.sleep(RETRY_SECONDS if records else 0)


if __name__ == "__main__":
    main()
