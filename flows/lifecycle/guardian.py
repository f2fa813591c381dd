"""Process that outlives a process of flows: if that is killed, it sets the flow runs to their true status.

Until then it only waits, and has imported nothing but a little of Python.
"""

import atexit
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

GRACE_SECONDS = 10.0
"""A runner reports a lost process itself, with its exit status, and ranks without a flow log for up to 10 s more."""
RETRY_SECONDS = 5.0
WAIT_SECONDS = 1800.0  # longest wait for APIs that are away
_pipes: list[int] = []  # this process's end of the guardian's stdin, once there is a guardian


def guard(record: Path) -> None:
    """Tell the guardian of this process about the record of a flow run; start it before the first one."""
    if not _pipes:
        read, write = os.pipe()
        guardian = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=read,
            stdout=subprocess.DEVNULL,  # whoever reads this process's output must not wait for the guardian
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a signal to the process group or the terminal leaves it alone
        )
        os.close(read)
        _pipes.append(write)
        atexit.register(guardian.wait)
        atexit.register(guardian.kill)  # at the end of a process in order; called first, as it is registered last
    with suppress(BrokenPipeError):  # somebody has killed it: `paceline serve` or the next flow takes its place
        os.write(_pipes[0], f"{record}\n".encode())


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
